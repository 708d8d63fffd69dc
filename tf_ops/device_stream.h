// Where on a GPU a kernel's tensors are: the one thing that the kernels for GPUs need beyond those for the host.
// Pure functions, callable from any thread. In a file of its own, since the headers of TensorFlow's streams are large
// and not every TensorFlow has them (CMakeLists.txt asks).
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace dl_comm {

// The memory of one call's tensors, as the core's calls name it.
struct DeviceStream {
  int32_t device = -1;     // the GPU, as the CUDA driver counts in this process; negative: host memory
  std::size_t stream = 0;  // the cudaStream_t on which the tensors were made and will be used
};

// Sets `target` to the GPU on which a kernel runs, and to the stream on which TensorFlow puts that GPU's computations:
// those of the kernel's inputs before the kernel is called, those that use its results after it is done. The stream is
// TensorFlow's and lives as long as the device. Fails when the device cannot tell.
absl::Status device_stream_of_kernel(tensorflow::OpKernelContext* context, DeviceStream& target);

}  // namespace dl_comm
