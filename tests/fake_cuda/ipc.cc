// cuIpc*: device memory of other processes on this machine. A handle holds the name of the backing file, the size, and
// the address in the owner.
//
// Only the start of memory from cuMemAlloc has a handle; pools, managed memory and mapped chunks have none.
// As in the driver, a context cannot open memory whose address range in the owner overlaps an open one. The owner has
// then freed the latter.
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "abort.h"
#include "memory.h"

using namespace fake;

namespace {

struct Handle {
  char file[40];
  unsigned long long bytes, start;
  int device;
};
static_assert(sizeof(Handle) <= sizeof(CUipcMemHandle));

struct Open {
  KeepAlive region;
  Handle handle;
  int times = 0;
};

// Open memory, by backing file and opening context.
struct Opened {
  std::mutex mutex;
  std::map<std::pair<std::string, Context*>, Open> all;
};

Opened& opened() { return never_destroyed<Opened>(); }

long owner_of(const Handle& handle) { return std::strtol(handle.file + std::strlen(kFilePrefix), nullptr, 10); }

bool overlap(const Handle& one, const Handle& other) {
  return owner_of(one) == owner_of(other) && one.start < other.start + other.bytes &&
         other.start < one.start + one.bytes;
}

CUresult map_new(const Handle& handle, Context* context, Open* open) {
  for (const auto& [key, other] : opened().all) {
    if (key.second != context || other.region == nullptr) continue;
    if (overlap(handle, other.handle)) return CUDA_ERROR_ALREADY_MAPPED;
  }
  const KeepAlive region =
      mapped_region(Kind::kOpened, Backing::open(handle.file, handle.device, handle.bytes), context);
  if (region == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!add_region(region)) die("cuIpcOpenMemHandle: the memory cannot be mapped");
  open->region = region;
  open->handle = handle;
  return CUDA_SUCCESS;
}

}  // namespace

FAKE_API CUresult cuIpcGetMemHandle(CUipcMemHandle* out, CUdeviceptr address) {
  Context* context = nullptr;
  if (const CUresult refused = need_context(&context)) return refused;
  if (setting("FAKE_CUDA_NO_IPC", 0) != 0) return CUDA_ERROR_NOT_SUPPORTED;
  const KeepAlive region = address < kOffset ? nullptr : find_region(address - kOffset, 1);
  if (out == nullptr || region == nullptr || region->kind != Kind::kDevice || region->address() != address) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  Handle handle = {};
  const std::string& file = region->backing->file;
  if (file.size() >= sizeof handle.file) die("cuIpcGetMemHandle: the name %s is too long", file.c_str());
  std::memcpy(handle.file, file.c_str(), file.size());
  handle.bytes = region->bytes;
  handle.start = region->address();
  handle.device = region->device;
  *out = {};
  std::memcpy(out->reserved, &handle, sizeof handle);
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* address, CUipcMemHandle in, unsigned flags) {
  Context* context = nullptr;
  if (const CUresult refused = need_context(&context)) return refused;
  Handle handle = {};
  std::memcpy(&handle, in.reserved, sizeof handle);
  const bool valid = memchr(handle.file, '\0', sizeof handle.file) != nullptr && handle.bytes > 0 &&
                     std::strncmp(handle.file, kFilePrefix, std::strlen(kFilePrefix)) == 0;
  if (address == nullptr || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS || !valid) return CUDA_ERROR_INVALID_VALUE;
  if (owner_of(handle) == static_cast<long>(getpid())) return CUDA_ERROR_INVALID_CONTEXT;
  if (const CUresult refused = need_device(handle.device)) return refused;

  if (handle.device != context->device && !are_peers(context->device, handle.device)) {
    return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  }

  const std::lock_guard lock(opened().mutex);
  Open& open = opened().all[{handle.file, context}];
  if (open.region == nullptr) {
    const CUresult refused = map_new(handle, context, &open);
    if (refused != CUDA_SUCCESS) {
      opened().all.erase({handle.file, context});
      return refused;
    }
  }
  ++open.times;
  *address = open.region->address();
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
  Context* context = nullptr;
  if (const CUresult refused = need_context(&context)) return refused;
  const std::lock_guard lock(opened().mutex);
  const KeepAlive region = address < kOffset ? nullptr : find_region(address - kOffset, 1);
  if (region == nullptr || region->kind != Kind::kOpened || region->address() != address) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const auto open = opened().all.find({region->backing->file, region->context});
  if (--open->second.times == 0) {
    remove_region(region->start, {Kind::kOpened});
    opened().all.erase(open);
  }
  return CUDA_SUCCESS;
}
