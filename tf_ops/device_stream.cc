// Gets TensorFlow's compute stream as a cudaStream_t. No CUDA header is needed: the handle is an integer.

#include "tf_ops/device_stream.h"

#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/public/version.h"
#include "tf_ops/convert.h"
#include "xla/stream_executor/stream.h"

namespace dl_comm {

namespace {

stream_executor::Stream* stream_of(tensorflow::OpKernelContext* context) {
  const auto* own = context->op_device_context();
  if (own != nullptr && own->stream() != nullptr) return own->stream();
  const auto* info = context->device()->tensorflow_accelerator_device_info();
  return info != nullptr ? info->stream : nullptr;
}

#if TF_MAJOR_VERSION == 2 && TF_MINOR_VERSION < 17
absl::Status fill(stream_executor::Stream& stream, void* memory, std::size_t bytes) {
  stream_executor::DeviceMemoryBase area(memory, bytes);
  stream.ThenMemZero(&area, bytes);
  if (!stream.ok()) return to_status(DL_COMM_ERROR_INTERNAL, "the device's compute stream has failed");
  return absl::OkStatus();
}
#else
// `Area` is the type of a device address, of which the name depends on TensorFlow's version.
template <class Area>
absl::Status fill(stream_executor::Stream& stream, absl::Status (stream_executor::Stream::*mem_zero)(Area*, uint64_t),
                  void* memory, std::size_t bytes) {
  Area area(memory, bytes);
  return (stream.*mem_zero)(&area, bytes);
}

absl::Status fill(stream_executor::Stream& stream, void* memory, std::size_t bytes) {
  return fill(stream, &stream_executor::Stream::MemZero, memory, bytes);
}
#endif

}  // namespace

absl::Status fill_with_zeros_on_device(tensorflow::OpKernelContext* context, void* memory, std::size_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  stream_executor::Stream* const stream = stream_of(context);
  if (stream == nullptr) return to_status(DL_COMM_ERROR_INTERNAL, "the device has no compute stream");
  return fill(*stream, memory, bytes);
}

absl::Status device_stream_of_kernel(tensorflow::OpKernelContext* context, DeviceStream& target) {
  const auto* info = context->device()->tensorflow_accelerator_device_info();
  const stream_executor::Stream* stream = stream_of(context);
  void* handle = stream != nullptr ? stream->platform_specific_handle().stream : nullptr;
  // A null handle would be CUDA's default stream, which TensorFlow does not use.
  if (info == nullptr || info->gpu_id < 0 || handle == nullptr) {
    return to_status(DL_COMM_ERROR_INTERNAL, absl::StrCat(context->device()->name(), " has no CUDA compute stream"));
  }
  target.device = info->gpu_id;
  target.stream = reinterpret_cast<std::size_t>(handle);
  return absl::OkStatus();
}

}  // namespace dl_comm
