#include "call.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "dl_comm/errors.h"

namespace dl_comm::c10d_backend {
namespace {

// The core's element types.
constexpr std::pair<at::ScalarType, dlDataType_t> kElementTypes[] = {{at::kFloat, DL_COMM_FLOAT32},
                                                                     {at::kBFloat16, DL_COMM_BFLOAT16},
                                                                     {at::kHalf, DL_COMM_FLOAT16},
                                                                     {at::kDouble, DL_COMM_FLOAT64},
                                                                     {at::kChar, DL_COMM_INT8},
                                                                     {at::kByte, DL_COMM_UINT8},
                                                                     {at::kShort, DL_COMM_INT16},
                                                                     {at::kUInt16, DL_COMM_UINT16},
                                                                     {at::kInt, DL_COMM_INT32},
                                                                     {at::kUInt32, DL_COMM_UINT32},
                                                                     {at::kLong, DL_COMM_INT64},
                                                                     {at::kUInt64, DL_COMM_UINT64},
                                                                     {at::kComplexFloat, DL_COMM_COMPLEX64},
                                                                     {at::kComplexDouble, DL_COMM_COMPLEX128},
                                                                     {at::kBool, DL_COMM_BOOL}};

// The core's element type; nullopt for those that it lacks.
std::optional<dlDataType_t> element_type(at::ScalarType type) {
  for (const auto& [known, code] : kElementTypes)
    if (known == type) return code;
  return std::nullopt;
}

// The core's operator for torch's. Bool has a sum and a maximum ("or"), and a product and a minimum ("and").
int reduce_code(::c10d::ReduceOp::RedOpType op, bool is_bool) {
  using Op = ::c10d::ReduceOp;
  switch (op) {
    case Op::SUM:
      return is_bool ? DL_COMM_BITOR : DL_COMM_SUM;
    case Op::AVG:
      return DL_COMM_MEAN;
    case Op::PRODUCT:
      return is_bool ? DL_COMM_BITAND : DL_COMM_PRODUCT;
    case Op::MIN:
      return is_bool ? DL_COMM_BITAND : DL_COMM_MIN;
    case Op::MAX:
      return is_bool ? DL_COMM_BITOR : DL_COMM_MAX;
    case Op::BAND:
      return DL_COMM_BITAND;
    case Op::BOR:
      return DL_COMM_BITOR;
    case Op::BXOR:
      return DL_COMM_BITXOR;
    case Op::PREMUL_SUM:
      return DL_COMM_SCALED_SUM;
    default:
      throw_invalid("this reduction operator is unknown to dl_comm");
  }
}

void* address(const at::Tensor& tensor) {
  // Without a check for tensors whose data must not be changed: the caller has given them for that.
  return tensor.defined() ? const_cast<void*>(tensor.const_data_ptr()) : nullptr;
}

}  // namespace

void throw_error(int code, const std::string& message) { C10_THROW_ERROR(DistBackendError, error_text(code, message)); }

void check(int code) {
  if (code < 0) throw_error(code, dl_comm_last_error());
}

void throw_invalid(const std::string& message) { C10_THROW_ERROR(ValueError, "dl_comm: " + message); }

void check_dense(const at::Tensor& tensor, const char* what) {
  if (!tensor.defined()) throw_invalid(std::string(what) + " is undefined");
  if (tensor.layout() != at::kStrided)
    throw_invalid(c10::str(what, " has the layout ", tensor.layout(), "; this collective needs a dense tensor"));
  if (!tensor.is_non_overlapping_and_dense())
    throw_invalid(c10::str(what, " has gaps (shape ", tensor.sizes(), ", strides ", tensor.strides(),
                           "); pass tensor.contiguous()"));
  if (!tensor.is_cpu() && !tensor.is_cuda())
    throw_invalid(c10::str(what, " is on ", tensor.device(), "; dl_comm supports CPU and CUDA tensors only"));
}

const char* function_name(const char* title) {
  const char* const colon = std::strchr(title, ':');
  return colon != nullptr ? colon + 1 : title;
}

Call::Call(int collective, const char* name, bool moves)
    : title(name), collective_(collective), moves_(moves), name_(function_name(name)) {
  tensors.reserve(2);
  buffers.reserve(1);
}

void Call::set_reduce(const ::c10d::ReduceOp& op, at::ScalarType type) {
  reduce_ = reduce_code(op.op_, type == at::kBool);
  if (reduce_ != DL_COMM_SCALED_SUM) return;
  const auto* const factor = dynamic_cast<const ::c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  if (factor == nullptr) throw_invalid("PREMUL_SUM has no factor");
  prescale_ = factor->tensor_factor.defined() ? factor->tensor_factor.item<double>() : factor->double_factor;
}

void Call::add(const at::Tensor& src, const at::Tensor& dst, const at::Tensor& block) {
  add_buffer(src, dst, block, static_cast<std::size_t>(block.numel()), block.sizes());
}

void Call::add(const at::Tensor& src, const at::Tensor& dst, std::size_t length) {
  add_buffer(src, dst, src.defined() ? src : dst, length, {});
}

void Call::keep(const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  if (has_device_ && tensor.device() != device_)
    throw_invalid(c10::str("the tensors of one call are on ", device_, " and on ", tensor.device()));
  device_ = tensor.device();
  has_device_ = true;
  tensors.push_back(tensor);
}

void Call::add_buffer(const at::Tensor& src, const at::Tensor& dst, const at::Tensor& of, std::size_t length,
                      at::IntArrayRef shape) {
  if (src.defined() && dst.defined() && src.scalar_type() != dst.scalar_type())
    throw_invalid(c10::str("input and output have different types: ", src.scalar_type(), " and ", dst.scalar_type()));
  keep(src);
  if (!dst.is_same(src)) keep(dst);
  if (!of.is_same(src) && !of.is_same(dst)) blocks_.push_back(of);
  auto type = element_type(of.scalar_type());
  if (!type) {
    if (!moves_)
      throw_invalid(c10::str(function_name(title), " of ", of.scalar_type(), ": dl_comm has no arithmetic for it"));
    // The ranks compare names, so that tensors of different types do not match.
    name_ += c10::str(" of ", of.scalar_type());
    type = DL_COMM_UINT8;
    length *= of.element_size();
    for (auto* counts : {&send_counts, &receive_counts})
      for (auto& count : *counts) count *= of.element_size();
    shape = {};
  }
  // Memory is sent in its own order, which must then be equal on all ranks.
  if (!of.is_contiguous()) name_ += c10::str(" with strides ", of.strides());
  dl_comm_buffer_t buffer{};
  buffer.src = address(src);
  buffer.dst = address(dst);
  buffer.length = length;
  buffer.dtype = *type;
  buffer.ndim = static_cast<int>(shape.size());
  buffer.shape = shape.data();
  buffers.push_back(buffer);
}

void Call::refuse(const std::string& why) { name_ += " refused: " + why.substr(0, why.find('\n')); }

dl_comm_call_t Call::describe(double timeout) {
  dl_comm_call_t call{};
  call.size = sizeof call;
  call.collective = collective_;
  call.reduce = reduce_;
  call.root = root;
  call.buffers = buffers.data();
  call.count = buffers.size();
  call.send_counts = send_counts.empty() ? nullptr : send_counts.data();
  call.receive_counts = receive_counts.empty() ? nullptr : receive_counts.data();
  call.name = name_.c_str();
  call.timeout = timeout;
  call.prescale = prescale_;
  call.postscale = 1;
  return call;
}

}  // namespace dl_comm::c10d_backend
