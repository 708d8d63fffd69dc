// Where tensors are: host memory, or the memory of a GPU and the stream that torch uses there.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace dl_comm::torch_ops {

// A GPU and a stream of it; no GPU is host memory.
struct DeviceStream {
  int32_t device = -1;
  std::size_t stream = 0;  // a cudaStream_t
};

// Gives torch's current stream of a GPU; not 0 when torch cannot tell it.
using StreamSource = int32_t (*)(int32_t device, std::size_t* stream);

// Sets who tells of streams: the library for CUDA (cuda_streams.cc), which only a torch with CUDA loads.
void set_stream_source(StreamSource source);

// torch's current stream where `target` is; the same place for host memory. Throws std::runtime_error as
// `device_stream_of`.
DeviceStream with_current_stream(DeviceStream target);

// Where the tensor is, with torch's current stream there; nothing for other kinds of devices. Throws
// std::runtime_error "dl_comm error -3: ..." for a CUDA tensor before `set_stream_source`.
std::optional<DeviceStream> device_stream_of(const ::torch::stable::Tensor& tensor);

}  // namespace dl_comm::torch_ops
