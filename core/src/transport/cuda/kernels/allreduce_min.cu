// Kernels that write the minimum of tensors.
#include "allreduce.cuh"

#define DL_COMM_MIN(type, S) DL_COMM_KERNEL(min_##type, reduce, Min<S>)
DL_COMM_ORDERED_TYPES(DL_COMM_MIN)
