// Compiles the core's kernels for the host and lists them.
//
// The include path contains their folder. Thread rule: as in kernels_shim.h.
#include <cstring>

#include "all_kernels.h"
#include "host_kernel.h"

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

#define DL_COMM_LISTED(name, S) {#name, S::kSize, S::kSize, kMaxThreads, run<::name>},
#define DL_COMM_LISTED_ACC(name, S) {#name, S::kSize, sizeof(S::Acc), kMaxThreads, run<::name>},
constexpr HostKernel kHostKernels[] = {DL_COMM_ALL_KERNELS};

}  // namespace

const HostKernel* find_host_kernel(const std::string& name) {
  for (const HostKernel& kernel : kHostKernels) {
    if (name == kernel.name) return &kernel;
  }
  return nullptr;
}

std::vector<std::string> host_kernel_names() {
  std::vector<std::string> names;
  for (const HostKernel& kernel : kHostKernels) names.emplace_back(kernel.name);
  return names;
}

}  // namespace fake
