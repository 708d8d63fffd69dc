// Describes torch tensors to the core.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "device_stream.h"
#include "dl_comm/request.h"

namespace dl_comm::torch_ops {

using ::torch::stable::Tensor;

// The tensor's element type; nullopt for those that the core lacks.
std::optional<dlDataType_t> element_type(const Tensor& tensor);

// The shape of a tensor, which the tensor keeps.
inline Extents extents_of(const Tensor& tensor) { return tensor.sizes(); }

// torch's name of the element type.
std::string type_name(const Tensor& tensor);

// A list of tensors in the core's format. It borrows the tensors' memory: the caller keeps the tensors alive.
//
// Thread rule: one thread at a time.
class TensorViews : public ViewList {
 public:
  // `labels`: the tensors' names for error messages, one per line, or empty. The caller keeps the text.
  explicit TensorViews(std::size_t count, std::string_view labels = {}) : ViewList(count), labels_(labels) {}
  TensorViews(std::size_t count, std::string&& labels) = delete;

  // Checks a tensor before it is added. Throws an Error unless the tensor is dense and on the device of the tensors
  // before it: the host or a CUDA GPU.
  void check_dense(const Tensor& tensor);

  // Adds a dense tensor that the call reads and writes in place.
  // Throws an Error if it is not contiguous or its element type is not one of the plugin.
  void add(const Tensor& tensor);

  // Adds a contiguous tensor to read and the contiguous tensor for its result.
  void add(const Tensor& source, const Tensor& target);

  // Adds a tensor of a collective: blocks of this shape, of the type of `described`, at these addresses.
  void add_block(const Tensor& described, const void* source, void* target, Extents block);

  // The tensors' device and torch's current stream there.
  DeviceStream device_stream() const { return device_stream_; }

 private:
  std::string name() const;

  const std::string_view labels_;
  DeviceStream device_stream_;
  bool has_device_ = false;
};

// The options of a call, which refer to the texts. On a GPU torch's stream waits for the result, the host does not.
inline Options options_of(rust::Str name, rust::Str tensor_names, bool caller_blocks, double timeout,
                          const DeviceStream& target) {
  return {name, {}, tensor_names, caller_blocks, false, timeout, target.device, target.stream, false};
}

}  // namespace dl_comm::torch_ops
