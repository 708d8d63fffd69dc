// The GPU and compute stream of a kernel. A separate file, because TensorFlow's stream headers are large, and some
// versions do not ship them (see CMakeLists.txt).
// Pure functions, callable from any thread.
#pragma once

#include <cstddef>

#include "absl/status/status.h"
#include "dl_comm/request.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace dl_comm {

// Sets `target` to the kernel's GPU and TensorFlow's compute stream there. TensorFlow enqueues the computation of the
// inputs before it calls the kernel, and the use of the results after the kernel is done. TensorFlow owns the stream,
// which lives as long as the device. Fails if the device has no such stream.
absl::Status device_stream_of_kernel(tensorflow::OpKernelContext* context, DeviceStream& target);

// Enqueues the filling of device memory with zeros on the kernel's stream.
absl::Status fill_with_zeros_on_device(tensorflow::OpKernelContext* context, void* memory, std::size_t bytes);

}  // namespace dl_comm
