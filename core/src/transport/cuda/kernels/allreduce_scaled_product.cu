// Kernels that write products of tensors with factors.
#include "allreduce.cuh"

#define DL_COMM_SCALED_PRODUCT(type, S) DL_COMM_KERNEL(scaled_product_##type, reduce, Scaled<Product<S>>)
DL_COMM_FLOAT_TYPES(DL_COMM_SCALED_PRODUCT)
