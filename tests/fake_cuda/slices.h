// Time slices: with FAKE_CUDA_TIME_SLICES=1, kernels of different processes never overlap on a device, as on a GPU
// shared without MPS.
//
// Only kernels need a slice; waits, copies and memory operations on streams do not. Thread rule: any thread.
#pragma once

namespace fake {

// KeepAlive while a kernel runs. Kernels of one process share the slice.
class Slice {
 public:
  // Waits until no other process has the device.
  explicit Slice(int device);
  ~Slice();
  Slice(const Slice&) = delete;
  Slice& operator=(const Slice&) = delete;

 private:
  const int device_;
};

}  // namespace fake
