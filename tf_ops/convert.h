// Converts TensorFlow's element types, tensors and errors to and from the core's.
// Pure functions, callable from any thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "dl_comm/errors.h"
#include "dl_comm/request.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.pb.h"

// The element types of the core, as in the definition of an op.
#define DL_COMM_ALL_TYPES                                                                                \
  "half, bfloat16, float, double, int8, uint8, int16, uint16, int32, uint32, int64, uint64, complex64, " \
  "complex128, bool"

namespace dl_comm {

// The core's element types.
inline constexpr std::pair<tensorflow::DataType, dlDataType_t> kElementTypes[] = {
    {tensorflow::DT_FLOAT, DL_COMM_FLOAT32},
    {tensorflow::DT_BFLOAT16, DL_COMM_BFLOAT16},
    {tensorflow::DT_HALF, DL_COMM_FLOAT16},
    {tensorflow::DT_DOUBLE, DL_COMM_FLOAT64},
    {tensorflow::DT_INT8, DL_COMM_INT8},
    {tensorflow::DT_UINT8, DL_COMM_UINT8},
    {tensorflow::DT_INT16, DL_COMM_INT16},
    {tensorflow::DT_UINT16, DL_COMM_UINT16},
    {tensorflow::DT_INT32, DL_COMM_INT32},
    {tensorflow::DT_UINT32, DL_COMM_UINT32},
    {tensorflow::DT_INT64, DL_COMM_INT64},
    {tensorflow::DT_UINT64, DL_COMM_UINT64},
    {tensorflow::DT_COMPLEX64, DL_COMM_COMPLEX64},
    {tensorflow::DT_COMPLEX128, DL_COMM_COMPLEX128},
    {tensorflow::DT_BOOL, DL_COMM_BOOL}};

// Adds a tensor to a call: `input` to read and `output`, of the same type, to write; they may share memory. `block` is
// the shape of what a rank contributes or receives, whichever is less. Both must stay alive until the call completes.
// Throws an Error if the core does not support the type.
inline void add(ViewList& list, const tensorflow::Tensor& input, const tensorflow::Tensor& output, Extents block) {
  const tensorflow::DataType type = input.dtype();
  const auto* const known = std::find_if(std::begin(kElementTypes), std::end(kElementTypes),
                                         [type](const auto& entry) { return entry.first == type; });
  if (known == std::end(kElementTypes)) refuse_type(TensorTitle(list.size()), tensorflow::DataTypeString(type));
  list.add(input.data(), output.data(), known->second, block);
}

// Adds an input and an output of the same shape.
inline void add(ViewList& list, const tensorflow::Tensor& input, const tensorflow::Tensor& output) {
  add(list, input, output, input.shape().dim_sizes());
}

// The status for a nonzero DL_COMM_ERROR_* code of dl_comm.h. A lost peer is an internal error: on "unavailable" or
// "aborted", a MonitoredSession would create new sessions forever, although the peer never returns. Calls by name that
// differ are no invalid argument: each is right by itself.
inline absl::Status to_status(int32_t code, absl::string_view message, bool by_name = false) {
  const std::string text = error_text(code, {message.data(), message.size()});
  switch (code) {
    case DL_COMM_ERROR_INVALID:
    case DL_COMM_ERROR_DTYPE:
      return absl::InvalidArgumentError(text);
    case DL_COMM_ERROR_MISMATCH:
      return by_name ? absl::FailedPreconditionError(text) : absl::InvalidArgumentError(text);
    case DL_COMM_ERROR_STATE:
      return absl::FailedPreconditionError(text);
    case DL_COMM_ERROR_TIMEOUT:
      return absl::DeadlineExceededError(text);
    case DL_COMM_ERROR_SYSTEM:
      return absl::ResourceExhaustedError(text);
    default:
      return absl::InternalError(text);
  }
}

// What `body` returns; the status of an Error that it throws.
template <class Body>
absl::Status status_of(Body body) {
  try {
    return body();
  } catch (const Error& error) {
    const std::string_view message = error.message();
    return to_status(error.code(), {message.data(), message.size()});
  }
}

}  // namespace dl_comm
