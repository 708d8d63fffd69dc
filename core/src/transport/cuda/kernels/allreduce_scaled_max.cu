// Kernels that write maxima of tensors with factors.
#include "allreduce.cuh"

#define DL_COMM_SCALED_MAX(type, S) DL_COMM_KERNEL(scaled_max_##type, reduce, Scaled<MaxOfAccs<S>>)
DL_COMM_FLOAT_TYPES(DL_COMM_SCALED_MAX)
