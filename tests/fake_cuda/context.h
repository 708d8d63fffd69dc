// Devices and their primary contexts; which context is current in a thread.
//
// Contexts are never freed. Thread rule: everything may be called from any thread; the stack of current contexts is the
// calling thread's own.
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

// The primary context of a device. `lock` guards what stands below it.
struct Context {
  int device = 0;
  CUcontext handle = nullptr;
  std::mutex lock;
  int retained = 0;
  // The devices whose memory its kernels may touch, beside its own.
  std::set<int> peers;
  // The stream that is 0 and 1, and the one that is 2; made at their first use.
  std::shared_ptr<Stream> special[2];
  // All its streams.
  std::vector<std::weak_ptr<Stream>> streams;
  // With FAKE_CUDA_ONE_QUEUE=1, operations run in the order of these numbers, whatever their streams: the next to be
  // given out, and the one whose turn it is.
  std::atomic<std::uint64_t> next{0}, turn{0};
};

// CUDA_SUCCESS after cuInit in this process (not in one forked from it), else CUDA_ERROR_NOT_INITIALIZED.
CUresult need_init();
// Also refuses a number that is no device's.
CUresult need_device(CUdevice device);
// Also gives the calling thread's current context; refuses when there is none, or when it is released.
CUresult need_context(Context** context);

int device_count();
// Ten times the compute capability of the devices: FAKE_CUDA_CAPABILITY. Without it 9.1, which NVRTC has no machine
// code for, so that it makes PTX.
int capability();
// The GPU that a device is, or, with FAKE_CUDA_MIG=n, one of n slices of.
int gpu_of(int device);
// Whether kernels of one device may touch memory of the other: not with FAKE_CUDA_NO_PEERS=1, and not slices.
bool are_peers(int device, int other);
CUuuid device_uuid(int device);

}  // namespace fake
