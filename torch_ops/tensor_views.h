// From torch tensors to what the core takes.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstddef>
#include <string>
#include <vector>

#include "device_stream.h"
#include "dl_comm_core/src/ffi.rs.h"

namespace dl_comm::torch_ops {

using ::torch::stable::Tensor;

// A list of tensors as the core sees it. It borrows the tensors' memory: whoever makes one keeps the tensors.
//
// Thread rule: plain data, one thread at a time.
class TensorViews {
 public:
  // `labels`: the tensors' names, a line each, or empty; they stand in error messages.
  TensorViews(std::size_t count, const std::string& labels);

  // Throws std::runtime_error "dl_comm error -1: ..." unless the tensor, which is to be added next, is a dense one in
  // host memory, or in that of the GPU in which those before it are.
  void check_dense(const Tensor& tensor);

  // Adds a dense tensor that is read and written in place.
  // Throws std::runtime_error (error -1 or -2) when it is not contiguous, or of an element type that the core lacks.
  void add(const Tensor& tensor);

  // Adds a contiguous tensor that is read, with the contiguous tensor that is written in its place.
  void add(const Tensor& source, const Tensor& target);

  rust::Slice<const TensorView> tensors() const;
  rust::Slice<const int64_t> shapes() const;

  // Where the tensors are, and the stream on which they were made: torch's current one.
  DeviceStream device_stream() const { return device_stream_; }

 private:
  std::string name() const;

  const std::string& labels_;
  std::vector<TensorView> tensors_;
  std::vector<int64_t> shapes_;
  DeviceStream device_stream_;
  bool has_device_ = false;
};

}  // namespace dl_comm::torch_ops
