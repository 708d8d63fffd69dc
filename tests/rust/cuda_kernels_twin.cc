// The twin of the CUDA kernels for tests/rust/cuda_kernels.rs: core/src/transport/cuda/kernels.cu compiled for the CPU.
// The threads of a launch run one after the other.
//
// Thread rule: one launch at a time. The caller owns all memory.
#include <string_view>

#include "../fake_cuda/kernels_shim.h"
// The shim comes first.
#include "../../core/src/transport/cuda/kernels.cu"

// Runs a kernel; false when there is none of that name.
extern "C" bool dl_comm_twin_launch(const char* name, const Work* work, unsigned blocks, unsigned threads) {
  void (*kernel)(Work) = nullptr;
#define DL_COMM_FIND(candidate) \
  if (std::string_view(name) == #candidate) kernel = candidate;
  DL_COMM_KERNELS(DL_COMM_FIND)
#undef DL_COMM_FIND
  if (kernel == nullptr) return false;
  gridDim.x = blocks;
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) kernel(*work);
  }
  return true;
}
