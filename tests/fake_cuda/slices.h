// Time slices: with FAKE_CUDA_TIME_SLICES=1, kernels of different processes never run at the same time on a device, as
// on a GPU that processes share without MPS.
//
// Only kernels take them: streams that wait, copies and values in memory go on. Thread rule: may be used from any
// thread.
#pragma once

namespace fake {

// Held while a kernel runs. Those of one process may run at the same time.
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
