// The core's CUDA kernels compiled for the CPU, for tests/rust/cuda_kernels.rs. The threads of a launch run one after
// the other.
//
// Thread rule: one launch at a time. The caller owns all memory.
#include <string_view>

#include "../fake_cuda/kernels_shim.h"
// The shim must come first.
#include "../../core/src/transport/cuda/kernels/allreduce_bits.cu"
#include "../../core/src/transport/cuda/kernels/allreduce_integers.cu"
#include "../../core/src/transport/cuda/kernels/allreduce_max.cu"
#include "../../core/src/transport/cuda/kernels/allreduce_mean.cu"
#include "../../core/src/transport/cuda/kernels/allreduce_min.cu"
#include "../../core/src/transport/cuda/kernels/allreduce_product.cu"
#include "../../core/src/transport/cuda/kernels/allreduce_scaled_max.cu"
#include "../../core/src/transport/cuda/kernels/allreduce_scaled_mean.cu"
#include "../../core/src/transport/cuda/kernels/allreduce_scaled_min.cu"
#include "../../core/src/transport/cuda/kernels/allreduce_scaled_product.cu"
#include "../../core/src/transport/cuda/kernels/reduce_sum.cu"

namespace {

struct Kernel {
  std::string_view name;
  void (*run)(const KernelArgs&);
};
#define DL_COMM_LISTED(name, S) {#name, name},
#define DL_COMM_LISTED_MEAN(type, S) DL_COMM_LISTED(average_##type, S)
#define DL_COMM_LISTED_SUM(type, S) DL_COMM_LISTED(sum_##type, S)
#define DL_COMM_LISTED_MIN(type, S) DL_COMM_LISTED(min_##type, S)
#define DL_COMM_LISTED_MAX(type, S) DL_COMM_LISTED(max_##type, S)
#define DL_COMM_LISTED_PRODUCT(type, S) DL_COMM_LISTED(product_##type, S)
#define DL_COMM_LISTED_SCALED(type, S)     \
  DL_COMM_LISTED(scaled_average_##type, S) \
  DL_COMM_LISTED(scaled_min_##type, S)     \
  DL_COMM_LISTED(scaled_max_##type, S)     \
  DL_COMM_LISTED(scaled_product_##type, S)
constexpr Kernel kKernels[] = {
    DL_COMM_FLOAT_TYPES(DL_COMM_LISTED_SCALED) DL_COMM_TYPES(DL_COMM_LISTED_MEAN) DL_COMM_TYPES(DL_COMM_LISTED_SUM)
        DL_COMM_OTHER_INTEGERS(DL_COMM_LISTED_MEAN) DL_COMM_ORDERED_TYPES(DL_COMM_LISTED_MIN)
            DL_COMM_ORDERED_TYPES(DL_COMM_LISTED_MAX) DL_COMM_PRODUCT_TYPES(DL_COMM_LISTED_PRODUCT)
                DL_COMM_BIT_OPERATORS(DL_COMM_LISTED){"copy_bytes", copy_bytes}};

}  // namespace

// Runs a kernel; false if there is none of that name.
extern "C" bool dl_comm_host_kernel_launch(const char* name, const KernelArgs* work, unsigned blocks,
                                           unsigned threads) {
  for (const Kernel& kernel : kKernels) {
    if (kernel.name != name) continue;
    gridDim.x = blocks;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
      for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) kernel.run(*work);
    }
    return true;
  }
  return false;
}
