// Kernels that write minima of tensors with factors.
#include "allreduce.cuh"

#define DL_COMM_SCALED_MIN(type, S) DL_COMM_KERNEL(scaled_min_##type, reduce, Scaled<MinOfAccs<S>>)
DL_COMM_FLOAT_TYPES(DL_COMM_SCALED_MIN)
