// Decodes the arguments of an op from torch's stack of boxed values.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "dl_comm/errors.h"

namespace dl_comm::torch_ops {

// torch's own conversion to std::string leaks one string per call (stableivalue_conversions.h, torch 2.11).
inline std::string take_string(StableIValue value) {
  const auto handle = ::torch::stable::detail::to<StringHandle>(value);
  std::size_t length = 0;
  const char* text = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
  TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &text));
  std::string result(text, length);
  TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
  return result;
}

// Returns a team or a rank. Throws an Error for a number that does not fit into int32_t.
inline int32_t take_number(StableIValue value) {
  const auto number = ::torch::stable::detail::to<int64_t>(value);
  if (number != static_cast<int32_t>(number)) {
    throw Error(DL_COMM_ERROR_INVALID, number, " is neither a team nor a rank");
  }
  return static_cast<int32_t>(number);
}

// The leading arguments of all ops on tensors: (Tensor[] tensors, int team_or_root, str name, str labels).
struct Arguments {
  explicit Arguments(StableIValue* stack)
      : tensors(::torch::stable::detail::to<std::vector<::torch::stable::Tensor>>(stack[0])),
        number(take_number(stack[1])),
        name(take_string(stack[2])),
        labels(take_string(stack[3])) {}

  std::vector<::torch::stable::Tensor> tensors;
  int32_t number;
  std::string name;
  std::string labels;
};

}  // namespace dl_comm::torch_ops
