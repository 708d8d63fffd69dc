#include "device_stream.h"

#include <atomic>

#include "dl_comm/errors.h"

namespace dl_comm::torch_ops {
namespace {

std::atomic<StreamSource>& source() {
  static std::atomic<StreamSource> instance{nullptr};
  return instance;
}

}  // namespace

void set_stream_source(StreamSource given) { source() = given; }

DeviceStream with_current_stream(DeviceStream target) {
  if (target.device < 0) return target;
  const StreamSource streams = source();
  if (streams == nullptr) {
    throw Error(DL_COMM_ERROR_STATE,
                "a tensor is on a CUDA device, but libdl_comm_torch_cuda.so is not loaded: rebuild it with this ",
                "torch by 'python -m dl_comm.build --force'");
  }
  DeviceStream found{target.device, 0};
  if (streams(target.device, &found.stream) != 0) {
    throw Error(DL_COMM_ERROR_SYSTEM, "torch returned no current stream for CUDA device ", target.device);
  }
  return found;
}

std::optional<DeviceStream> device_stream_of(const ::torch::stable::Tensor& tensor) {
  if (tensor.is_cpu()) return DeviceStream{};
  if (!tensor.is_cuda()) return std::nullopt;
  return with_current_stream({static_cast<int32_t>(tensor.get_device_index()), 0});
}

}  // namespace dl_comm::torch_ops
