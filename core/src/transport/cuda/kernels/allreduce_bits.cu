// Kernels that write bits of tensors, combined by a logical operator.
#include "allreduce.cuh"

#define DL_COMM_BITS(name, Operator) DL_COMM_KERNEL(name, reduce, Bitwise<Operator>)
DL_COMM_BIT_OPERATORS(DL_COMM_BITS)
