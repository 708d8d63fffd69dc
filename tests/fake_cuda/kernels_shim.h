// What NVRTC knows by itself, for the kernels on the host, which are included after it.
//
// Addresses of device memory are those of the host plus 1 << 60, so that a kernel that uses one without at() crashes.
// Thread rule: where a thread of a kernel is, is the calling thread's own.
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
