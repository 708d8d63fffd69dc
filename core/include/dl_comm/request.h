// Calls of the core as the op libraries describe them: pure conversions, callable from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dl_comm/blocks.h"
#include "dl_comm_core/src/ffi.rs.h"

namespace dl_comm {

// The device of one call's tensors.
struct DeviceStream {
  int32_t device = -1;     // CUDA ordinal in this process; negative: host memory
  std::size_t stream = 0;  // the cudaStream_t that orders the tensors' earlier and later uses
};

template <typename Number>
rust::Slice<const Number> slice(const std::vector<Number>& numbers) {
  return {numbers.data(), numbers.size()};
}

// Throws the error for an element type that the core lacks. `type`: the framework's name of it.
template <typename Title, typename Name>
[[noreturn]] void refuse_type(const Title& tensor, const Name& type) {
  throw Error(DL_COMM_ERROR_DTYPE, tensor, " has an element type that dl_comm does not support: ", type);
}

// The tensors of one call: one view per tensor, all their extents in one list, and the lengths of blocks in elements,
// if they differ, as in `Collective`. The caller keeps the tensors' memory.
//
// Thread rule: one thread at a time.
class ViewList {
 public:
  explicit ViewList(std::size_t count) {
    views_.reserve(count);
    shapes_.reserve(4 * count);
  }

  // Adds a tensor: reads `source` and writes `target`, blocks of this type and shape.
  void add(const void* source, void* target, dlDataType_t type, Extents block) {
    TensorView view;
    view.src = reinterpret_cast<std::size_t>(source);
    view.dst = reinterpret_cast<std::size_t>(target);
    view.length = 1;
    for (const int64_t extent : block) view.length *= static_cast<std::size_t>(extent);
    view.dtype = type;
    view.ndim = block.size;
    views_.push_back(view);
    shapes_.insert(shapes_.end(), block.begin(), block.end());
  }

  // Adds the lengths of the blocks of the next tensor, of this shape and these counts; none if `call` has no counts.
  void add_counts(const BlockCall& call, Extents shape) {
    for (const std::size_t length : in_elements(call.send, row_length(shape))) send_counts_.push_back(length);
    for (const std::size_t length : in_elements(call.receive, row_length(shape))) receive_counts_.push_back(length);
  }

  rust::Slice<const TensorView> views() const { return slice(views_); }
  rust::Slice<const int64_t> shapes() const { return slice(shapes_); }
  rust::Slice<const std::size_t> send_counts() const { return slice(send_counts_); }
  rust::Slice<const std::size_t> receive_counts() const { return slice(receive_counts_); }
  std::size_t size() const { return views_.size(); }

 private:
  std::vector<TensorView> views_;
  std::vector<int64_t> shapes_;
  std::vector<std::size_t> send_counts_;
  std::vector<std::size_t> receive_counts_;
};

// The group of the plugin's broadcasts, as the number of a `Collective`.
constexpr uint64_t kControlGroup = ~uint64_t{0};

// A broadcast of the plugin.
inline Collective broadcast_of(const Options& options, int32_t root) {
  Collective call;
  call.options = options;
  call.group = kControlGroup;
  call.collective = DL_COMM_BROADCAST;
  call.reduce = DL_COMM_SUM;  // not used
  call.root = root;
  call.prescale = 1;
  call.postscale = 1;
  call.by_name = false;
  return call;
}

}  // namespace dl_comm
