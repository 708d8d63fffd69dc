// Kernels that write means (and sums) of tensors with factors.
#include "allreduce.cuh"

#define DL_COMM_SCALED_AVERAGE(type, S) DL_COMM_KERNEL(scaled_average_##type, reduce, Scaled<S>)
DL_COMM_FLOAT_TYPES(DL_COMM_SCALED_AVERAGE)
