// The core's CUDA kernels compiled for the CPU, for tests/rust/cuda_kernels.rs. The threads of a launch run one after
// the other.
//
// Thread rule: one launch at a time. The caller owns all memory.
#include <string_view>

#include "all_kernels.h"

namespace {

struct Kernel {
  std::string_view name;
  void (*run)(const KernelArgs&);
};
#define DL_COMM_LISTED(name, S) {#name, name},
#define DL_COMM_LISTED_ACC(name, S) DL_COMM_LISTED(name, S)
constexpr Kernel kKernels[] = {DL_COMM_ALL_KERNELS};

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
