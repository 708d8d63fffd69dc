// Converts TensorFlow's element types, tensors and errors to and from the core's.
// Pure functions, callable from any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "dl_comm/completion.h"
#include "dl_comm_core/src/ffi.rs.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.pb.h"

// The element types of the core, as in the definition of an op.
#define DL_COMM_ALL_TYPES                                                                                \
  "half, bfloat16, float, double, int8, uint8, int16, uint16, int32, uint32, int64, uint64, complex64, " \
  "complex128, bool"

namespace dl_comm {

// The core's element type for a TensorFlow type; nullopt if the core does not support it.
inline std::optional<ElementType> to_element_type(tensorflow::DataType dtype) {
  switch (dtype) {
    case tensorflow::DT_HALF:
      return ElementType::Float16;
    case tensorflow::DT_BFLOAT16:
      return ElementType::BFloat16;
    case tensorflow::DT_FLOAT:
      return ElementType::Float32;
    case tensorflow::DT_DOUBLE:
      return ElementType::Float64;
    case tensorflow::DT_INT8:
      return ElementType::Int8;
    case tensorflow::DT_UINT8:
      return ElementType::UInt8;
    case tensorflow::DT_INT16:
      return ElementType::Int16;
    case tensorflow::DT_UINT16:
      return ElementType::UInt16;
    case tensorflow::DT_INT32:
      return ElementType::Int32;
    case tensorflow::DT_UINT32:
      return ElementType::UInt32;
    case tensorflow::DT_INT64:
      return ElementType::Int64;
    case tensorflow::DT_UINT64:
      return ElementType::UInt64;
    case tensorflow::DT_COMPLEX64:
      return ElementType::Complex64;
    case tensorflow::DT_COMPLEX128:
      return ElementType::Complex128;
    case tensorflow::DT_BOOL:
      return ElementType::Bool;
    default:
      return std::nullopt;
  }
}

// The tensors of one call in the core's format: one view per tensor, and all dimensions in one list.
struct TensorList {
  std::vector<TensorView> views;
  std::vector<int64_t> shapes;
  // The lengths of blocks in elements, if they differ, as in `Collective`.
  std::vector<size_t> send_counts;
  std::vector<size_t> receive_counts;

  explicit TensorList(int count) { views.reserve(count); }

  // Adds `input` to read and `output`, of the same type, to write; they may share memory. `block` is the shape of what
  // a rank contributes or receives, whichever is less. Both must stay alive until the call completes. Fails if the core
  // does not support the type.
  absl::Status add(const tensorflow::Tensor& input, const tensorflow::Tensor& output,
                   const tensorflow::TensorShape& block) {
    const std::optional<ElementType> dtype = to_element_type(input.dtype());
    if (!dtype) {
      return absl::InvalidArgumentError(
          absl::StrCat("dl_comm error -2: no collective takes tensors of ", tensorflow::DataTypeString(input.dtype())));
    }
    TensorView view;
    view.src = reinterpret_cast<size_t>(input.data());
    view.dst = reinterpret_cast<size_t>(output.data());
    view.length = static_cast<size_t>(block.num_elements());
    view.dtype = *dtype;
    view.ndim = static_cast<size_t>(block.dims());
    views.push_back(view);
    for (int i = 0; i < block.dims(); ++i) shapes.push_back(block.dim_size(i));
    return absl::OkStatus();
  }

  // Adds an input and an output of the same shape.
  absl::Status add(const tensorflow::Tensor& input, const tensorflow::Tensor& output) {
    return add(input, output, input.shape());
  }
};

// The status for a nonzero DL_COMM_ERROR_* code of dl_comm.h. Its message begins "dl_comm error <code>:", which Python
// parses. A lost peer is an internal error: on "unavailable" or "aborted", a MonitoredSession would create new sessions
// forever, although the peer never returns.
inline absl::Status to_status(int32_t code, absl::string_view message) {
  const std::string text = absl::StrCat("dl_comm error ", code, ": ", message);
  switch (code) {
    case -1:  // DL_COMM_ERROR_INVALID
    case -2:  // DL_COMM_ERROR_DTYPE
    case -4:  // DL_COMM_ERROR_MISMATCH
      return absl::InvalidArgumentError(text);
    case -3:  // DL_COMM_ERROR_STATE
      return absl::FailedPreconditionError(text);
    case -5:  // DL_COMM_ERROR_TIMEOUT
      return absl::DeadlineExceededError(text);
    case -7:  // DL_COMM_ERROR_SYSTEM
      return absl::ResourceExhaustedError(text);
    default:
      return absl::InternalError(text);
  }
}

}  // namespace dl_comm
