// Lists of tensors as one block of memory, which is what the core sends.
#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <functional>
#include <vector>

namespace dl_comm::c10d_backend {

// The elements of a list, one tensor after the other, in the order of their indices.
struct Flat {
  at::Tensor tensor;
  // Copies from `tensor` to the list; empty if they are the same memory.
  std::function<void()> copy_back;
};

// Whether the tensors are contiguous and lie one after the other in one storage.
bool is_adjacent(const std::vector<at::Tensor>& list);

// For reading: the tensors' own memory if they lie one after the other, else a copy.
at::Tensor flat_input(const std::vector<at::Tensor>& list);

// For writing.
Flat flat_output(const std::vector<at::Tensor>& list);

// The only tensor of a list, which must be dense. `what` names the list in the message.
const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* what);

// Throws unless the tensors have one type and one device. `what` names the list in the message.
void check_alike(const std::vector<at::Tensor>& list, const char* what);

// The number of elements of each tensor.
std::vector<std::size_t> lengths(const std::vector<at::Tensor>& list);

// Whether all tensors have as many elements as the first.
bool is_even(const std::vector<at::Tensor>& list);

// Whether two dense tensors share memory.
bool overlap(const at::Tensor& a, const at::Tensor& b);

// `input`, or a copy of it if it shares memory with `output` elsewhere than in this rank's block: the part of `blocks`
// (one of the two) that begins at element `start`, where `single` (the other one) may be.
at::Tensor without_overlap(const at::Tensor& input, const at::Tensor& output, const at::Tensor& blocks,
                           const at::Tensor& single, int64_t start);

}  // namespace dl_comm::c10d_backend
