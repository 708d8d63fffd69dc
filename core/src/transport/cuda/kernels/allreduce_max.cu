// Kernels that write the maximum of tensors.
#include "allreduce.cuh"

#define DL_COMM_MAX(type, S) DL_COMM_KERNEL(max_##type, reduce, Max<S>)
DL_COMM_ORDERED_TYPES(DL_COMM_MAX)
