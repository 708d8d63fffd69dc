// Built-ins of NVRTC for the kernels on the host. Include it before them.
//
// A device address is the host address plus 1 << 60, so a kernel that dereferences one without at() crashes. Thread
// rule: the indices are thread-local.
#pragma once

#include "host_kernel.h"

#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))

static thread_local fake::Index blockIdx, threadIdx, gridDim, blockDim;

template <class T>
T* at(unsigned long long address) {
  return reinterpret_cast<T*>(address - (1ull << 60));
}
