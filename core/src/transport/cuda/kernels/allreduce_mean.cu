// Kernels that write the mean of tensors, and one that copies bytes.
#include "allreduce.cuh"

#define DL_COMM_MEAN(type, S) DL_COMM_KERNEL(average_##type, reduce, S)
DL_COMM_TYPES(DL_COMM_MEAN)
DL_COMM_KERNEL(copy_bytes, reduce, Bytes)
