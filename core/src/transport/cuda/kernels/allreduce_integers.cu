// Kernels that write the mean of tensors of less frequent integers.
#include "allreduce.cuh"

#define DL_COMM_MEAN_OF_INTEGERS(type, S) DL_COMM_KERNEL(average_##type, reduce, S)
DL_COMM_OTHER_INTEGERS(DL_COMM_MEAN_OF_INTEGERS)
