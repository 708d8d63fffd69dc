#include "lists.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "call.h"

namespace dl_comm::c10d_backend {
namespace {

const char* begin_of(const at::Tensor& tensor) { return static_cast<const char*>(tensor.const_data_ptr()); }

const char* end_of(const at::Tensor& tensor) { return begin_of(tensor) + tensor.nbytes(); }

int64_t total(const std::vector<at::Tensor>& list) {
  int64_t sum = 0;
  for (const auto& tensor : list) sum += tensor.numel();
  return sum;
}

at::Tensor joined(const std::vector<at::Tensor>& list) { return list[0].detach().as_strided({total(list)}, {1}); }

// Calls `visit` with every tensor of the list and its part of `flat`.
template <typename Visit>
void for_each_part(const std::vector<at::Tensor>& list, const at::Tensor& flat, Visit visit) {
  int64_t start = 0;
  for (const auto& tensor : list) {
    visit(tensor.detach(), flat.narrow(0, start, tensor.numel()).view(tensor.sizes()));
    start += tensor.numel();
  }
}

}  // namespace

bool is_adjacent(const std::vector<at::Tensor>& list) {
  for (std::size_t i = 0; i < list.size(); ++i) {
    if (!list[i].is_contiguous() || !list[i].is_alias_of(list[0])) return false;
    if (i > 0 && begin_of(list[i]) != end_of(list[i - 1])) return false;
  }
  return true;
}

at::Tensor flat_input(const std::vector<at::Tensor>& list) {
  if (is_adjacent(list)) return joined(list);
  auto flat = at::empty({total(list)}, list[0].options().requires_grad(false));
  for_each_part(list, flat, [](const at::Tensor& tensor, at::Tensor part) { part.copy_(tensor); });
  return flat;
}

Flat flat_output(const std::vector<at::Tensor>& list) {
  if (is_adjacent(list)) return {joined(list), nullptr};
  auto flat = at::empty({total(list)}, list[0].options().requires_grad(false));
  auto copy_back = [list, flat] {
    for_each_part(list, flat, [](at::Tensor tensor, const at::Tensor& part) { tensor.copy_(part); });
  };
  return {flat, std::move(copy_back)};
}

const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* what) {
  if (tensors.size() != 1) throw_invalid(c10::str(what, ": a list of ", tensors.size(), " tensors; pass one tensor"));
  check_dense(tensors[0], what);
  return tensors[0];
}

void check_alike(const std::vector<at::Tensor>& list, const char* what) {
  if (list.empty()) throw_invalid(std::string(what) + " is an empty list");
  for (const auto& tensor : list) {
    check_dense(tensor, what);
    if (tensor.scalar_type() != list[0].scalar_type() || tensor.device() != list[0].device())
      throw_invalid(c10::str(what, " has tensors of different types or devices: ", list[0].scalar_type(), " on ",
                             list[0].device(), ", ", tensor.scalar_type(), " on ", tensor.device()));
  }
}

std::vector<std::size_t> lengths(const std::vector<at::Tensor>& list) {
  std::vector<std::size_t> result;
  for (const auto& tensor : list) result.push_back(static_cast<std::size_t>(tensor.numel()));
  return result;
}

bool is_even(const std::vector<at::Tensor>& list) {
  return std::all_of(list.begin(), list.end(),
                     [&list](const at::Tensor& tensor) { return tensor.numel() == list[0].numel(); });
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  return a.numel() > 0 && b.numel() > 0 && begin_of(a) < end_of(b) && begin_of(b) < end_of(a);
}

at::Tensor without_overlap(const at::Tensor& input, const at::Tensor& output, const at::Tensor& blocks,
                           const at::Tensor& single, int64_t start) {
  const bool in_own_block = begin_of(single) == begin_of(blocks) + start * blocks.element_size();
  return overlap(input, output) && !in_own_block ? input.clone() : input;
}

}  // namespace dl_comm::c10d_backend
