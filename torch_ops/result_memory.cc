#include "result_memory.h"

#include <dlfcn.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "dl_comm.h"

namespace dl_comm::torch_ops {
namespace {

using ::torch::stable::Tensor;

// `torch_from_blob` of the stable ABI of torch 2.11 (torch/csrc/stable/c/shim.h). This library is for torch 2.10 too,
// so it looks for the function.
using FromBlob = AOTITorchError (*)(void* data, int64_t ndim, const int64_t* sizes, const int64_t* strides,
                                    int64_t storage_offset, int32_t dtype, int32_t device_type, int32_t device_index,
                                    AtenTensorHandle* tensor, int32_t layout, const uint8_t* opaque_metadata,
                                    int64_t opaque_metadata_size, void (*deleter)(void* data, void* context),
                                    void* context);

FromBlob from_blob() {
  static const auto function = reinterpret_cast<FromBlob>(dlsym(RTLD_DEFAULT, "torch_from_blob"));
  return function;
}

std::size_t bytes_of(const Tensor& like, Extents shape) {
  std::size_t bytes = like.element_size();
  for (const int64_t extent : shape) {
    // Torch reports a length that is too large.
    if (extent < 0 || __builtin_mul_overflow(bytes, static_cast<std::size_t>(extent), &bytes)) return 0;
  }
  return bytes;
}

}  // namespace

Tensor new_result(const Tensor& like, Extents shape) {
  const auto ndim = static_cast<int64_t>(shape.size);
  std::vector<int64_t> strides(shape.size, 1);
  for (std::size_t axis = shape.size; axis-- > 1;) {
    strides[axis - 1] = strides[axis] * std::max<int64_t>(shape.data[axis], 1);
  }
  int32_t dtype = 0;
  int32_t type = 0;
  int32_t index = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &index));
  AtenTensorHandle handle = nullptr;
  void* const memory = like.is_cpu() && from_blob() != nullptr ? dl_comm_result_alloc(bytes_of(like, shape)) : nullptr;
  if (memory == nullptr) {
    // The op new_empty takes twice as long through the stable ABI.
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(ndim, shape.data, strides.data(), dtype, type, index, &handle));
    return Tensor(handle);
  }
  const auto release = [](void* data, void*) { dl_comm_result_free(data); };
  const AOTITorchError error = from_blob()(memory, ndim, shape.data, strides.data(), 0, dtype, type, index, &handle,
                                           aoti_torch_layout_strided(), nullptr, 0, release, nullptr);
  if (error != AOTI_TORCH_SUCCESS) dl_comm_result_free(memory);
  TORCH_ERROR_CODE_CHECK(error);
  return Tensor(handle);
}

}  // namespace dl_comm::torch_ops
