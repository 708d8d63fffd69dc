// Compiles the core's kernels for the host and lists them.
//
// The include path contains their folder. Thread rule: as in kernels_shim.h.
#include <cstring>

#include "kernels_shim.h"
// The shim comes first.
#include "allreduce_bits.cu"
#include "allreduce_integers.cu"
#include "allreduce_max.cu"
#include "allreduce_mean.cu"
#include "allreduce_min.cu"
#include "allreduce_product.cu"
#include "allreduce_scaled_max.cu"
#include "allreduce_scaled_mean.cu"
#include "allreduce_scaled_min.cu"
#include "allreduce_scaled_product.cu"
#include "host_kernel.h"
#include "reduce_sum.cu"

namespace fake {
namespace {

static_assert(sizeof(KernelArgs) == sizeof(::KernelArgs) && sizeof(BlockRange) == sizeof(::BlockRange) &&
                  kStopBytes == kStopCopies * kStopStride,
              "host_kernel.h differs from memory.cuh");

template <void kKernel(const ::KernelArgs&)>
void run(const KernelArgs& work, Index grid, Index block) {
  ::KernelArgs args;
  std::memcpy(&args, &work, sizeof args);
  gridDim = grid;
  blockDim = block;
  for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z) {
    for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y) {
      for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
        for (threadIdx.z = 0; threadIdx.z < block.z; ++threadIdx.z) {
          for (threadIdx.y = 0; threadIdx.y < block.y; ++threadIdx.y) {
            for (threadIdx.x = 0; threadIdx.x < block.x; ++threadIdx.x) kKernel(args);
          }
        }
      }
    }
  }
}

// A kernel whose targets have the size of its sources.
#define DL_COMM_HOST_KERNEL(name, S) {#name, S::kSize, S::kSize, kMaxThreads, run<::name>},
#define DL_COMM_HOST_MEAN(type, S) DL_COMM_HOST_KERNEL(average_##type, S)
#define DL_COMM_HOST_MIN(type, S) DL_COMM_HOST_KERNEL(min_##type, S)
#define DL_COMM_HOST_MAX(type, S) DL_COMM_HOST_KERNEL(max_##type, S)
#define DL_COMM_HOST_PRODUCT(type, S) DL_COMM_HOST_KERNEL(product_##type, S)
#define DL_COMM_HOST_SCALED(type, S)            \
  DL_COMM_HOST_KERNEL(scaled_average_##type, S) \
  DL_COMM_HOST_KERNEL(scaled_min_##type, S)     \
  DL_COMM_HOST_KERNEL(scaled_max_##type, S)     \
  DL_COMM_HOST_KERNEL(scaled_product_##type, S)
#define DL_COMM_HOST_BITS(name, Operator) DL_COMM_HOST_KERNEL(name, Bytes)
#define DL_COMM_HOST_SUM(type, S) {"sum_" #type, S::kSize, sizeof(S::Acc), kMaxThreads, run<::sum_##type>},
constexpr HostKernel kHostKernels[] = {
    DL_COMM_TYPES(DL_COMM_HOST_MEAN) DL_COMM_OTHER_INTEGERS(DL_COMM_HOST_MEAN) DL_COMM_ORDERED_TYPES(DL_COMM_HOST_MIN)
        DL_COMM_ORDERED_TYPES(DL_COMM_HOST_MAX) DL_COMM_PRODUCT_TYPES(DL_COMM_HOST_PRODUCT)
            DL_COMM_FLOAT_TYPES(DL_COMM_HOST_SCALED) DL_COMM_BIT_OPERATORS(DL_COMM_HOST_BITS)
                DL_COMM_TYPES(DL_COMM_HOST_SUM) DL_COMM_HOST_KERNEL(copy_bytes, Bytes)};

}  // namespace

const HostKernel* find_host_kernel(const std::string& name) {
  for (const HostKernel& kernel : kHostKernels) {
    if (name == kernel.name) return &kernel;
  }
  return nullptr;
}

}  // namespace fake
