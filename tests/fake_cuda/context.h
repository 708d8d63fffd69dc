// Devices, their primary contexts, and the current context of a thread.
//
// Contexts are never freed. Thread rule: any thread; the stack of current contexts is thread-local.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "cuda_api.h"

namespace fake {

class Stream;

// The primary context of a device. `lock` guards the fields below it.
struct Context {
  int device = 0;
  CUcontext handle = nullptr;
  std::mutex lock;
  int retained = 0;
  // The other devices whose memory its kernels may access.
  std::set<int> peers;
  // The streams with handles 0 and 1 (one stream) and 2; created at first use.
  std::shared_ptr<Stream> special[2];
  // All streams of the context.
  std::vector<std::weak_ptr<Stream>> streams;
  // With FAKE_CUDA_ONE_QUEUE=1, operations of all streams run in the order of their numbers: the next number to assign,
  // and the number that may run.
  std::atomic<std::uint64_t> next{0}, running{0};
};

// CUDA_SUCCESS after cuInit in this process, else CUDA_ERROR_NOT_INITIALIZED, as in a forked child.
CUresult need_init();
// Also rejects an invalid device.
CUresult need_device(CUdevice device);
// Also returns the thread's current context; fails if there is none or it was released.
CUresult need_context(Context** context);

int device_count();
// Ten times the compute capability, from FAKE_CUDA_CAPABILITY. The default of 9.1 is unknown to NVRTC, so it emits PTX.
int capability();
// The GPU of a device. With FAKE_CUDA_MIG=n, each GPU is n devices.
int gpu_of(int device);
// Whether kernels of one device may access memory of the other: not with FAKE_CUDA_NO_PEERS=1, nor between MIG slices.
bool are_peers(int device, int other);
CUuuid device_uuid(int device);

}  // namespace fake
