// Kernels that write means (and sums), minima, maxima and products of integers with factors.
#include "allreduce.cuh"

#define DL_COMM_SCALED_WIDE(type, S) DL_COMM_KERNEL(scaled_average_##type, reduce, Scaled<S>)
DL_COMM_WIDE_INTEGERS(DL_COMM_SCALED_WIDE)
#define DL_COMM_SCALED_ORDERED(type, S)                     \
  DL_COMM_KERNEL(scaled_min_##type, reduce, Scaled<Min<S>>) \
  DL_COMM_KERNEL(scaled_max_##type, reduce, Scaled<Max<S>>) \
  DL_COMM_KERNEL(scaled_product_##type, reduce, Scaled<Product<S>>)
DL_COMM_ORDERED_INTEGERS(DL_COMM_SCALED_ORDERED)
