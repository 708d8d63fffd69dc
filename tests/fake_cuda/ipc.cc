// cuIpc*: device memory of other processes of this machine. A handle is the name of the file behind an allocation and
// its size.
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "die.h"
#include "memory.h"

using namespace fake;

namespace {

struct Handle {
  char file[40];
  unsigned long long bytes;
  int device;
};
static_assert(sizeof(Handle) <= sizeof(CUipcMemHandle));

// What is open, by the name of its file and the context that opened it.
struct Opened {
  std::mutex mutex;
  std::map<std::pair<std::string, Context*>, Held> regions;
};

Opened& opened() { return immortal<Opened>(); }

bool of_this_process(const char* file) {
  return std::strtol(file + std::strlen(kFilePrefix), nullptr, 10) == static_cast<long>(getpid());
}

}  // namespace

FAKE_API CUresult cuIpcGetMemHandle(CUipcMemHandle* out, CUdeviceptr address) {
  Context* context = nullptr;
  if (const CUresult refused = need_context(&context)) return refused;
  if (setting("FAKE_CUDA_NO_IPC", 0) != 0) return CUDA_ERROR_NOT_SUPPORTED;
  const Held region = address < kOffset ? nullptr : find_region(address - kOffset, 1);
  if (out == nullptr || region == nullptr || region->kind != Kind::kDevice) return CUDA_ERROR_INVALID_VALUE;
  Handle handle = {};
  if (region->file.size() >= sizeof handle.file)
    die("cuIpcGetMemHandle: the name %s is too long", region->file.c_str());
  std::memcpy(handle.file, region->file.c_str(), region->file.size());
  handle.bytes = region->bytes;
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
  const bool sound = memchr(handle.file, '\0', sizeof handle.file) != nullptr && handle.bytes > 0 &&
                     std::strncmp(handle.file, kFilePrefix, std::strlen(kFilePrefix)) == 0;
  if (address == nullptr || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS || !sound) return CUDA_ERROR_INVALID_VALUE;
  if (of_this_process(handle.file)) return CUDA_ERROR_INVALID_CONTEXT;
  if (const CUresult refused = need_device(handle.device)) return refused;

  const std::lock_guard lock(opened().mutex);
  Held& region = opened().regions[{handle.file, context}];
  if (region == nullptr) {
    char* start = map_file(handle.file, handle.bytes, false);
    if (start == nullptr) {
      opened().regions.erase({handle.file, context});
      return CUDA_ERROR_INVALID_VALUE;
    }
    region = std::make_shared<Region>();
    region->kind = Kind::kOpened;
    region->start = number_of(start);
    region->bytes = handle.bytes;
    region->device = handle.device;
    region->context = context;
    region->file = handle.file;
    if (!add_region(region))
      die("cuIpcOpenMemHandle: the new memory lies in a range that is registered, which its owner has unmapped");
  }
  ++region->opened;
  *address = region->address();
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
  Context* context = nullptr;
  if (const CUresult refused = need_context(&context)) return refused;
  const std::lock_guard lock(opened().mutex);
  const Held region = address < kOffset ? nullptr : find_region(address - kOffset, 1);
  if (region == nullptr || region->kind != Kind::kOpened || region->address() != address) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (--region->opened == 0) {
    remove_region(region->start, Kind::kOpened);
    opened().regions.erase({region->file, region->context});
  }
  return CUDA_SUCCESS;
}
