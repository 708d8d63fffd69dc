// Streams of CUDA tensors, through c10 alone: the library needs neither CUDA's headers nor a torch with CUDA.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "dl_comm.h"

namespace dl_comm::c10d_backend {

// The stream that torch uses now on `device`.
c10::Stream current_stream(c10::Device device);

// The stream as the core names it.
dl_comm_device_t core_device(const c10::Stream& stream);

// Makes `later` wait for all work on `earlier` so far.
void order(const c10::Stream& earlier, const c10::Stream& later);

// Tells torch's allocator that `stream` uses these tensors' memory, which it must not give away before.
void record_use(const std::vector<at::Tensor>& tensors, const c10::Stream& stream);

// A stream for each device on which a group communicates.
//
// Thread rule: any thread.
class CommStreams {
 public:
  c10::Stream of(c10::Device device);

 private:
  std::mutex mutex_;
  std::unordered_map<c10::DeviceIndex, c10::Stream> streams_;
};

}  // namespace dl_comm::c10d_backend
