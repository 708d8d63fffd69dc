// The CUDA kernels for tests/rust/cuda_kernels.rs, on the host: core/src/transport/cuda/kernels compiled for the CPU.
// The threads of a launch run one after the other.
//
// Thread rule: one launch at a time. The caller owns all memory.
#include <string_view>

#include "../fake_cuda/kernels_shim.h"
// The shim comes first.
#include "../../core/src/transport/cuda/kernels/allreduce_mean.cu"
#include "../../core/src/transport/cuda/kernels/reduce_sum.cu"

namespace {

struct Kernel {
  std::string_view name;
  void (*run)(const KernelArgs&);
};
#define DL_COMM_LISTED(type, S) {"average_" #type, average_##type}, {"sum_" #type, sum_##type},
constexpr Kernel kKernels[] = {DL_COMM_TYPES(DL_COMM_LISTED){"copy_bytes", copy_bytes}};

}  // namespace

// Runs a kernel; false when there is none of that name.
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
