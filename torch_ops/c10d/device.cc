#include "device.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/version.h>

#include "call.h"

namespace dl_comm::c10d_backend {

c10::Stream current_stream(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

dl_comm_device_t core_device(const c10::Stream& stream) {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 11
  dl_comm_device_t device{};
  device.device = stream.device_index();
  device.stream = stream.native_handle();
  return device;
#else
  (void)stream;
  throw_invalid("CUDA tensors in torch.distributed need torch 2.11 or later");
#endif
}

void order(const c10::Stream& earlier, const c10::Stream& later) {
  c10::Event event(earlier.device_type());
  event.record(earlier);
  event.block(later);
}

void record_use(const std::vector<at::Tensor>& tensors, const c10::Stream& stream) {
  const c10::impl::VirtualGuardImpl guard(stream.device_type());
  for (const auto& tensor : tensors)
    if (tensor.device() == stream.device()) guard.recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

c10::Stream CommStreams::of(c10::Device device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = streams_.find(device.index());
  if (found != streams_.end()) return found->second;
  const auto stream = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, false);
  streams_.emplace(device.index(), stream);
  return stream;
}

}  // namespace dl_comm::c10d_backend
