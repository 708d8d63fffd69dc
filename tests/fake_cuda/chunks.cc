// cuMemAddressReserve, cuMemCreate, cuMemMap: memory chunks that a program maps at addresses of its choice.
//
// Access rights of chunks are not enforced: cuMemSetAccess only checks its arguments.
#include <map>
#include <mutex>

#include "abort.h"
#include "memory.h"

using namespace fake;

namespace {

// The driver's granularity for device memory.
constexpr std::size_t kGranularity = 2 << 20;

Handles<Backing, CUmemGenericAllocationHandle>& chunks() {
  return never_destroyed<Handles<Backing, CUmemGenericAllocationHandle>>();
}

// Reserved address ranges: bytes by start.
struct Reserved {
  std::mutex mutex;
  std::map<std::uintptr_t, std::size_t> ranges;
};

Reserved& reserved() { return never_destroyed<Reserved>(); }

bool is_whole(std::size_t bytes) { return bytes > 0 && bytes % kGranularity == 0; }

bool is_valid(const CUmemAllocationProp* prop) {
  return prop != nullptr && prop->type == CU_MEM_ALLOCATION_TYPE_PINNED &&
         prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE && need_device(prop->location.id) == CUDA_SUCCESS;
}

// Whether the range lies within one reservation.
bool is_reserved(CUdeviceptr address, std::size_t bytes) {
  if (address < kOffset || !is_whole(bytes)) return false;
  const std::uintptr_t start = address - kOffset;
  const std::lock_guard lock(reserved().mutex);
  const auto next = reserved().ranges.upper_bound(start);
  if (next == reserved().ranges.begin()) return false;
  const auto& [from, length] = *std::prev(next);
  return start - from < length && bytes <= length - (start - from);
}

// Whether any chunk is mapped in the range.
bool is_mapped(std::uintptr_t start, std::size_t bytes) {
  for (std::uintptr_t at = start; at < start + bytes; at += kGranularity) {
    if (find_region(at, 1) != nullptr) return true;
  }
  return false;
}

// The chunks mapped in the range; empty unless they fill it.
std::vector<KeepAlive> mapped_chunks(CUdeviceptr address, std::size_t bytes) {
  std::vector<KeepAlive> found;
  const std::uintptr_t start = address - kOffset;
  for (std::uintptr_t at = start; at < start + bytes; at += found.back()->bytes) {
    const KeepAlive chunk = find_region(at, 1);
    const bool fits =
        chunk != nullptr && chunk->kind == Kind::kChunk && chunk->start == at && chunk->bytes <= start + bytes - at;
    if (!fits) return {};
    found.push_back(chunk);
  }
  return found;
}

}  // namespace

FAKE_API CUresult cuMemGetAllocationGranularity(std::size_t* bytes, const CUmemAllocationProp* prop, int option) {
  if (const CUresult refused = need_init()) return refused;
  if (bytes == nullptr || !is_valid(prop) || option < 0 || option > 1) return CUDA_ERROR_INVALID_VALUE;
  *bytes = kGranularity;
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuMemAddressReserve(CUdeviceptr* address, std::size_t bytes, std::size_t, CUdeviceptr,
                                      unsigned long long flags) {
  if (const CUresult refused = need_init()) return refused;
  if (address == nullptr || !is_whole(bytes) || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  const std::uintptr_t start = reserve_addresses(bytes);
  const std::lock_guard lock(reserved().mutex);
  reserved().ranges[start] = bytes;
  *address = start + kOffset;
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuMemAddressFree(CUdeviceptr address, std::size_t bytes) {
  if (const CUresult refused = need_init()) return refused;
  const std::lock_guard lock(reserved().mutex);
  const auto found = reserved().ranges.find(address - kOffset);
  if (found == reserved().ranges.end() || found->second != bytes) return CUDA_ERROR_INVALID_VALUE;
  if (is_mapped(found->first, bytes)) return CUDA_ERROR_INVALID_VALUE;
  release_addresses(found->first, bytes);
  reserved().ranges.erase(found);
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, std::size_t bytes, const CUmemAllocationProp* prop,
                              unsigned long long flags) {
  if (const CUresult refused = need_init()) return refused;
  if (handle == nullptr || !is_whole(bytes) || !is_valid(prop) || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  const auto chunk = new_backing(prop->location.id, bytes);
  if (chunk == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = chunks().add(chunk);
  return CUDA_SUCCESS;
}

// Mapped memory stays valid until it is unmapped.
FAKE_API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  if (const CUresult refused = need_init()) return refused;
  return chunks().remove(handle) != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

FAKE_API CUresult cuMemMap(CUdeviceptr address, std::size_t bytes, std::size_t offset,
                           CUmemGenericAllocationHandle handle, unsigned long long flags) {
  Context* context = nullptr;
  if (const CUresult refused = need_context(&context)) return refused;
  const auto chunk = chunks().find(handle);
  if (chunk == nullptr || bytes != chunk->bytes || offset != 0 || flags != 0 || !is_reserved(address, bytes)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (is_mapped(address - kOffset, bytes)) return CUDA_ERROR_INVALID_VALUE;
  auto region = std::make_shared<Region>();
  region->kind = Kind::kChunk;
  region->start = address - kOffset;
  region->bytes = bytes;
  region->device = chunk->device;
  region->context = context;
  region->backing = chunk;
  if (!chunk->map(region->start) || !add_region(region)) die("cuMemMap: the chunk cannot be mapped");
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuMemSetAccess(CUdeviceptr address, std::size_t bytes, const CUmemAccessDesc* access,
                                 std::size_t count) {
  if (const CUresult refused = need_init()) return refused;
  if (!is_reserved(address, bytes) || mapped_chunks(address, bytes).empty() || access == nullptr || count == 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  for (std::size_t i = 0; i < count; ++i) {
    const bool valid = access[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
                       need_device(access[i].location.id) == CUDA_SUCCESS &&
                       access[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    if (!valid) return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

// Waits for running operations on the chunks: the caller may reuse the addresses afterwards.
FAKE_API CUresult cuMemUnmap(CUdeviceptr address, std::size_t bytes) {
  if (const CUresult refused = need_init()) return refused;
  if (!is_reserved(address, bytes)) return CUDA_ERROR_INVALID_VALUE;
  const std::vector<KeepAlive> found = mapped_chunks(address, bytes);
  for (const KeepAlive& chunk : found) {
    remove_region(chunk->start, {Kind::kChunk});
    for (int round = 0; chunk.use_count() > 1; backoff(round)) continue;
  }
  return found.empty() ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
