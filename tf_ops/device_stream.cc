// Gets TensorFlow's compute stream as a cudaStream_t. No CUDA header is needed: the handle is an integer.

#include "tf_ops/device_stream.h"

#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/device_base.h"
#include "xla/stream_executor/stream.h"

namespace dl_comm {

absl::Status device_stream_of_kernel(tensorflow::OpKernelContext* context, DeviceStream& target) {
  const auto* info = context->device()->tensorflow_accelerator_device_info();
  const auto* own = context->op_device_context();
  const stream_executor::Stream* stream = own != nullptr ? own->stream() : nullptr;
  if (stream == nullptr && info != nullptr) stream = info->stream;
  void* handle = stream != nullptr ? stream->platform_specific_handle().stream : nullptr;
  // A null handle would be CUDA's default stream, which TensorFlow does not use.
  if (info == nullptr || info->gpu_id < 0 || handle == nullptr) {
    return absl::InternalError(
        absl::StrCat("dl_comm error -9: ", context->device()->name(), " has no CUDA compute stream"));
  }
  target.device = info->gpu_id;
  target.stream = reinterpret_cast<std::size_t>(handle);
  return absl::OkStatus();
}

}  // namespace dl_comm
