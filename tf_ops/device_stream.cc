// TensorFlow's stream of a GPU as a number. No header of CUDA is needed: the number is the cudaStream_t.

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
  // No stream of TensorFlow's is CUDA's default one, which a null would stand for.
  if (info == nullptr || info->gpu_id < 0 || handle == nullptr) {
    return absl::InternalError(absl::StrCat("dl_comm error -9: ", context->device()->name(),
                                            " does not tell the CUDA stream that it computes on"));
  }
  target.device = info->gpu_id;
  target.stream = reinterpret_cast<std::size_t>(handle);
  return absl::OkStatus();
}

}  // namespace dl_comm
