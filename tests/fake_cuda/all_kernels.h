// All of the core's kernels, compiled for the host, and their list. The include path contains their folder.
//
// DL_COMM_ALL_KERNELS expands DL_COMM_LISTED(name, S) for each kernel whose targets have the size of its sources, and
// DL_COMM_LISTED_ACC(name, S) for each whose targets are accumulators. Define both before its use.
#pragma once

#include "kernels_shim.h"
// The shim comes first.
#include "allreduce_bits.cu"
#include "allreduce_integers.cu"
#include "allreduce_max.cu"
#include "allreduce_mean.cu"
#include "allreduce_min.cu"
#include "allreduce_product.cu"
#include "allreduce_scaled_integers.cu"
#include "allreduce_scaled_max.cu"
#include "allreduce_scaled_mean.cu"
#include "allreduce_scaled_min.cu"
#include "allreduce_scaled_product.cu"
#include "reduce_sum.cu"

#define DL_COMM_LISTED_MEAN(type, S) DL_COMM_LISTED(average_##type, S)
#define DL_COMM_LISTED_MIN(type, S) DL_COMM_LISTED(min_##type, S)
#define DL_COMM_LISTED_MAX(type, S) DL_COMM_LISTED(max_##type, S)
#define DL_COMM_LISTED_PRODUCT(type, S) DL_COMM_LISTED(product_##type, S)
#define DL_COMM_LISTED_SCALED_MEAN(type, S) DL_COMM_LISTED(scaled_average_##type, S)
#define DL_COMM_LISTED_SCALED(type, S) \
  DL_COMM_LISTED(scaled_min_##type, S) \
  DL_COMM_LISTED(scaled_max_##type, S) \
  DL_COMM_LISTED(scaled_product_##type, S)
#define DL_COMM_LISTED_BITS(name, Operator) DL_COMM_LISTED(name, Bytes)
#define DL_COMM_LISTED_SUM(type, S) DL_COMM_LISTED_ACC(sum_##type, S)
#define DL_COMM_ALL_KERNELS                         \
  DL_COMM_TYPES(DL_COMM_LISTED_MEAN)                \
  DL_COMM_OTHER_INTEGERS(DL_COMM_LISTED_MEAN)       \
  DL_COMM_ORDERED_TYPES(DL_COMM_LISTED_MIN)         \
  DL_COMM_ORDERED_TYPES(DL_COMM_LISTED_MAX)         \
  DL_COMM_PRODUCT_TYPES(DL_COMM_LISTED_PRODUCT)     \
  DL_COMM_FLOAT_TYPES(DL_COMM_LISTED_SCALED_MEAN)   \
  DL_COMM_FLOAT_TYPES(DL_COMM_LISTED_SCALED)        \
  DL_COMM_WIDE_INTEGERS(DL_COMM_LISTED_SCALED_MEAN) \
  DL_COMM_ORDERED_INTEGERS(DL_COMM_LISTED_SCALED)   \
  DL_COMM_BIT_OPERATORS(DL_COMM_LISTED_BITS) DL_COMM_TYPES(DL_COMM_LISTED_SUM) DL_COMM_LISTED(copy_bytes, Bytes)
