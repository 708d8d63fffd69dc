#include "tensor_views.h"

#include <optional>
#include <sstream>
#include <stdexcept>

#include "dl_comm/errors.h"

namespace dl_comm::torch_ops {
namespace {

// What follows in the labels are names for the ranks to compare, see core/src/collective/tensor_names.rs.
constexpr char kComparedNames = '\x1f';

// Line `index` of `labels`; empty if there are fewer lines.
std::string line(std::string_view labels, std::size_t index) {
  std::istringstream lines(std::string(labels.substr(0, labels.find(kComparedNames))));
  std::string text;
  for (std::size_t i = 0; i <= index; ++i) {
    if (!std::getline(lines, text)) return "";
  }
  return text;
}

}  // namespace

std::optional<dlDataType_t> element_type(const Tensor& tensor) {
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  if (dtype == aoti_torch_dtype_float32()) return DL_COMM_FLOAT32;
  if (dtype == aoti_torch_dtype_float64()) return DL_COMM_FLOAT64;
  if (dtype == aoti_torch_dtype_bfloat16()) return DL_COMM_BFLOAT16;
  if (dtype == aoti_torch_dtype_float16()) return DL_COMM_FLOAT16;
  if (dtype == aoti_torch_dtype_int64()) return DL_COMM_INT64;
  if (dtype == aoti_torch_dtype_int32()) return DL_COMM_INT32;
  if (dtype == aoti_torch_dtype_int8()) return DL_COMM_INT8;
  if (dtype == aoti_torch_dtype_uint8()) return DL_COMM_UINT8;
  if (dtype == aoti_torch_dtype_bool()) return DL_COMM_BOOL;
  if (dtype == aoti_torch_dtype_int16()) return DL_COMM_INT16;
  if (dtype == aoti_torch_dtype_uint16()) return DL_COMM_UINT16;
  if (dtype == aoti_torch_dtype_uint32()) return DL_COMM_UINT32;
  if (dtype == aoti_torch_dtype_uint64()) return DL_COMM_UINT64;
  if (dtype == aoti_torch_dtype_complex64()) return DL_COMM_COMPLEX64;
  if (dtype == aoti_torch_dtype_complex128()) return DL_COMM_COMPLEX128;
  return std::nullopt;
}

std::string type_name(const Tensor& tensor) {
  try {
    return ::torch::headeronly::toString(tensor.scalar_type());
  } catch (const std::runtime_error&) {  // the stable ABI has no name for it
    return "unknown";
  }
}

void TensorViews::check_dense(const Tensor& tensor) {
  if (!tensor.defined()) throw Error(DL_COMM_ERROR_INVALID, name(), " is undefined");
  const auto found = device_stream_of(tensor);
  if (!found) throw Error(DL_COMM_ERROR_INVALID, name(), " is neither in host memory nor on a CUDA device");
  if (has_device_ && found->device != device_stream_.device) {
    throw Error(DL_COMM_ERROR_INVALID, name(), " is on another device than the tensors before it: use a separate call");
  }
  device_stream_ = *found;
  has_device_ = true;
  int32_t layout = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(tensor.get(), &layout));
  if (layout != aoti_torch_layout_strided())
    throw Error(DL_COMM_ERROR_INVALID, name(), " is not dense: call .to_dense() first");
}

void TensorViews::add(const Tensor& tensor) {
  if (!tensor.is_contiguous())
    throw Error(DL_COMM_ERROR_INVALID, name(), " is not contiguous: call .contiguous() first");
  add(tensor, tensor);
}

void TensorViews::add(const Tensor& source, const Tensor& target) {
  const auto dtype = element_type(source);
  if (!dtype || *dtype > DL_COMM_BOOL) refuse_type(name(), type_name(source));
  ViewList::add(source.const_data_ptr(), target.mutable_data_ptr(), *dtype, extents_of(source));
}

void TensorViews::add_block(const Tensor& described, const void* source, void* target, Extents block) {
  const auto dtype = element_type(described);
  if (!dtype) refuse_type(name(), type_name(described));
  ViewList::add(source, target, *dtype, block);
}

std::string TensorViews::name() const {
  const std::size_t index = size();
  const std::string label = line(labels_, index);
  return "tensor " + std::to_string(index) + (label.empty() ? "" : " ('" + label + "')");
}

}  // namespace dl_comm::torch_ops
