// Kernels that write the product of tensors.
#include "allreduce.cuh"

#define DL_COMM_PRODUCT(type, S) DL_COMM_KERNEL(product_##type, reduce, Product<S>)
DL_COMM_PRODUCT_TYPES(DL_COMM_PRODUCT)
