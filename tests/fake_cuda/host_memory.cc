// cuMemHost*: pinned memory of the host, allocated here or registered by its owner.
#include <sys/mman.h>
#include <unistd.h>

#include <vector>

#include "die.h"
#include "memory.h"

using namespace fake;

namespace {

// Whether all these bytes are mapped in this process.
bool is_mapped(std::uintptr_t start, std::size_t bytes) {
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const std::uintptr_t from = start / page * page;
  const std::size_t pages = (start + bytes - from + page - 1) / page;
  std::vector<unsigned char> resident(pages);
  return mincore(reinterpret_cast<void*>(from), pages * page, resident.data()) == 0;
}

Held pinned(Kind kind, void* host, std::size_t bytes, Context* context) {
  auto region = std::make_shared<Region>();
  region->kind = kind;
  region->start = number_of(host);
  region->bytes = bytes;
  region->device = context->device;
  region->context = context;
  return region;
}

}  // namespace

FAKE_API CUresult cuMemHostRegister_v2(void* host, std::size_t bytes, unsigned flags) {
  Context* context = nullptr;
  if (const CUresult refused = need_context(&context)) return refused;
  if (host == nullptr || bytes == 0 || flags > 15) return CUDA_ERROR_INVALID_VALUE;
  if ((flags & CU_MEMHOSTREGISTER_IOMEMORY) != 0) return CUDA_ERROR_NOT_SUPPORTED;
  if (!is_mapped(number_of(host), bytes)) return CUDA_ERROR_INVALID_VALUE;
  const bool added = add_region(pinned(Kind::kRegistered, host, bytes, context));
  return added ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
}

FAKE_API CUresult cuMemHostUnregister(void* host) {
  Context* context = nullptr;
  if (const CUresult refused = need_context(&context)) return refused;
  const Held region = remove_region(number_of(host), {Kind::kRegistered});
  return region != nullptr ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

FAKE_API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* address, void* host, unsigned flags) {
  Context* context = nullptr;
  if (const CUresult refused = need_context(&context)) return refused;
  const Held region = find_region(number_of(host), 1);
  if (address == nullptr || flags != 0 || region == nullptr || !region->pinned()) return CUDA_ERROR_INVALID_VALUE;
  *address = number_of(host) + kOffset;
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuMemHostAlloc(void** host, std::size_t bytes, unsigned flags) {
  Context* context = nullptr;
  if (const CUresult refused = need_context(&context)) return refused;
  if (host == nullptr || bytes == 0 || flags > 7) return CUDA_ERROR_INVALID_VALUE;
  void* start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  if (!add_region(pinned(Kind::kHostAlloc, start, bytes, context))) {
    die("cuMemHostAlloc: the new memory lies in a range that is registered, which its owner has unmapped");
  }
  *host = start;
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuMemFreeHost(void* host) {
  Context* context = nullptr;
  if (const CUresult refused = need_context(&context)) return refused;
  return remove_region(number_of(host), {Kind::kHostAlloc}) != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
