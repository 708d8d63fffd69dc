// Launches of the core's CUDA kernels on the CPU, for tests/rust/cuda_kernels.rs: the fake driver has compiled them.
//
// Thread rule: one launch at a time. The caller owns all memory.
#include "host_kernel.h"

// Runs a kernel; false if there is none of that name.
extern "C" bool dl_comm_host_kernel_launch(const char* name, const fake::KernelArgs* work, unsigned blocks,
                                           unsigned threads) {
  const fake::HostKernel* kernel = fake::find_host_kernel(name);
  if (kernel == nullptr) return false;
  kernel->run(*work, {blocks, 1, 1}, {threads, 1, 1});
  return true;
}
