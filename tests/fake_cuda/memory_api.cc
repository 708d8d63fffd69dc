// cuMemAlloc, cuMemFree and address queries.
//
// The real cuMemFree waits for the device; this one does so only with FAKE_CUDA_WAITING_CALLS=1. No caller may rely on
// that wait: an operation that uses freed memory aborts when it runs.
#include "abort.h"
#include "counters.h"
#include "memory.h"
#include "stream.h"

using namespace fake;

namespace {

// The region of a device address or of a pinned host address.
KeepAlive known(CUdeviceptr address) {
  if (address >= kOffset) return find_region(address - kOffset, 1);
  KeepAlive region = find_region(address, 1);
  return region != nullptr && region->pinned() ? region : nullptr;
}

// The default pool of a device: an invalid address.
CUmemoryPool pool_of(int device) {
  return reinterpret_cast<CUmemoryPool>((std::uintptr_t{0x5fd0} << 48) + 16 * static_cast<std::uintptr_t>(device + 1));
}

}  // namespace

namespace {

CUresult allocate(Kind kind, CUdeviceptr* address, std::size_t bytes, Context* context) {
  if (address == nullptr || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  if (capture_forbids()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  const KeepAlive region = new_memory(kind, bytes, context);
  if (region == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = region->address();
  return CUDA_SUCCESS;
}

}  // namespace

FAKE_API CUresult cuMemAlloc_v2(CUdeviceptr* address, std::size_t bytes) {
  Context* context = nullptr;
  if (const CUresult refused = need_context(&context)) return refused;
  return allocate(Kind::kDevice, address, bytes, context);
}

FAKE_API CUresult cuMemAllocManaged(CUdeviceptr* address, std::size_t bytes, unsigned flags) {
  Context* context = nullptr;
  if (const CUresult refused = need_context(&context)) return refused;
  if (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST) return CUDA_ERROR_INVALID_VALUE;
  return allocate(Kind::kManaged, address, bytes, context);
}

// Allocates at once, not in stream order.
FAKE_API CUresult cuMemAllocFromPoolAsync(CUdeviceptr* address, std::size_t bytes, CUmemoryPool pool, CUstream handle) {
  std::shared_ptr<Stream> stream;
  if (const CUresult refused = need_stream(handle, &stream)) return refused;
  if (pool != pool_of(stream->context->device)) return CUDA_ERROR_INVALID_VALUE;
  return allocate(Kind::kPool, address, bytes, stream->context);
}

FAKE_API CUresult cuMemAllocAsync(CUdeviceptr* address, std::size_t bytes, CUstream handle) {
  std::shared_ptr<Stream> stream;
  if (const CUresult refused = need_stream(handle, &stream)) return refused;
  return cuMemAllocFromPoolAsync(address, bytes, pool_of(stream->context->device), handle);
}

FAKE_API CUresult cuDeviceGetDefaultMemPool(CUmemoryPool* pool, CUdevice device) {
  if (const CUresult refused = need_device(device)) return refused;
  if (pool == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *pool = pool_of(device);
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuMemFreeAsync(CUdeviceptr address, CUstream handle) {
  std::shared_ptr<Stream> stream;
  if (const CUresult refused = need_stream(handle, &stream)) return refused;
  const KeepAlive region = address < kOffset ? nullptr : find_region(address - kOffset, 1);
  if (region == nullptr || !region->allocated() || region->address() != address) return CUDA_ERROR_INVALID_VALUE;
  return stream->push([start = region->start, kind = region->kind] {
    if (remove_region(start, {kind}) == nullptr) die("cuMemFreeAsync: the memory was freed meanwhile");
  });
}

FAKE_API CUresult cuMemFree_v2(CUdeviceptr address) {
  Context* context = nullptr;
  if (const CUresult refused = need_context(&context)) return refused;
  if (address == 0) return CUDA_SUCCESS;
  wait_if_calls_block(*context);
  const KeepAlive region = remove_region(address - kOffset, {Kind::kDevice, Kind::kPool, Kind::kManaged});
  return region != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

FAKE_API CUresult cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
  Context* context = nullptr;
  if (const CUresult refused = need_context(&context)) return refused;
  if (free != nullptr) *free = kDeviceBytes - bytes_in_use(context->device);
  if (total != nullptr) *total = kDeviceBytes;
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, std::size_t* size, CUdeviceptr address) {
  Context* context = nullptr;
  if (const CUresult refused = need_context(&context)) return refused;
  const KeepAlive region = address < kOffset ? nullptr : find_region(address - kOffset, 1);
  if (region == nullptr) return CUDA_ERROR_NOT_FOUND;
  if (base != nullptr) *base = region->address();
  if (size != nullptr) *size = region->bytes;
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuPointerGetAttribute(void* out, CUpointer_attribute attribute, CUdeviceptr address) {
  ++counters().queries;
  if (const CUresult refused = need_init()) return refused;
  const KeepAlive region = known(address);
  if (out == nullptr || region == nullptr) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      *static_cast<CUcontext*>(out) = region->context->handle;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<CUmemorytype*>(out) = region->pinned() ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      *static_cast<unsigned long long*>(out) = region->id;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      *static_cast<int*>(out) = region->kind == Kind::kManaged;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *static_cast<int*>(out) = region->device;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
      *static_cast<int*>(out) = region->kind == Kind::kDevice && setting("FAKE_CUDA_NO_IPC", 0) == 0;
      return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}
