// Describes torch tensors to the core.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "device_stream.h"
#include "dl_comm_core/src/ffi.rs.h"

namespace dl_comm::torch_ops {

using ::torch::stable::Tensor;

// The tensor's element type; nullopt for those that the core lacks.
std::optional<ElementType> element_type(const Tensor& tensor);

// torch's name of the element type.
std::string type_name(const Tensor& tensor);

// A list of tensors in the core's format. It borrows the tensors' memory: the caller keeps the tensors alive.
//
// Thread rule: one thread at a time.
class TensorViews {
 public:
  // `labels`: the tensors' names for error messages, one per line, or empty. Must outlive this object.
  TensorViews(std::size_t count, const std::string& labels);

  // Checks a tensor before it is added. Throws std::runtime_error "dl_comm error -1: ..." unless the tensor is dense
  // and on the device of the tensors before it: the host or a CUDA GPU.
  void check_dense(const Tensor& tensor);

  // Adds a dense tensor that the call reads and writes in place.
  // Throws std::runtime_error (error -1: not contiguous; -2: not an element type of the plugin).
  void add(const Tensor& tensor);

  // Adds a contiguous tensor to read and the contiguous tensor for its result.
  void add(const Tensor& source, const Tensor& target);

  // Adds a tensor of a collective: blocks of `length` elements and of a shape, of the type of `described`, at these
  // addresses.
  void add_block(const Tensor& described, const void* source, void* target, std::size_t length,
                 const std::vector<int64_t>& shape);

  rust::Slice<const TensorView> tensors() const;
  rust::Slice<const int64_t> shapes() const;

  // The tensors' device and torch's current stream there.
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
