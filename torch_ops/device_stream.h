// The GPU of a call's tensors and torch's current stream on that GPU.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include "dl_comm/request.h"

namespace dl_comm::torch_ops {

// Stores torch's current stream of a GPU in `stream`. Returns 0 on success.
using StreamSource = int32_t (*)(int32_t device, std::size_t* stream);

// Sets the function that returns streams: that of cuda_streams.cc, which only a torch with CUDA loads.
void set_stream_source(StreamSource source);

// Returns `target`'s device with torch's current stream there. Throws as `device_stream_of`.
DeviceStream with_current_stream(DeviceStream target);

// The tensor's device with torch's current stream there; nullopt for a device that is neither host nor CUDA.
// Throws an Error (DL_COMM_ERROR_STATE) for a CUDA tensor before `set_stream_source`.
std::optional<DeviceStream> device_stream_of(const ::torch::stable::Tensor& tensor);

}  // namespace dl_comm::torch_ops
