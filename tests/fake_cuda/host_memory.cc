// cuMemHost*: pinned host memory, allocated here or registered by its owner.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "abort.h"
#include "memory.h"
#include "stream.h"

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

// File systems by device number as in /proc ("0:21").
std::map<std::string, std::string> file_systems() {
  std::map<std::string, std::string> found;
  std::ifstream mounts("/proc/self/mountinfo");
  for (std::string line; std::getline(mounts, line);) {
    std::istringstream fields(line);
    std::string field, device;
    fields >> field >> field >> device;
    while (fields >> field && field != "-") continue;
    if (fields >> field) found[device] = field;
  }
  return found;
}

// Whether a shared mapping of this file (from /proc/self/maps) is kernel shared memory: on tmpfs or hugetlbfs, or on
// the kernel's internal mount of one, which the list of mounts lacks.
bool is_shared_memory(const std::string& name, unsigned major, unsigned minor) {
  for (const char* own : {"/memfd:", "/SYSV", "/dev/zero", "/anon_hugepage"}) {
    if (name.rfind(own, 0) == 0) return true;
  }
  const auto systems = file_systems();
  const auto found = systems.find(std::to_string(major) + ":" + std::to_string(minor));
  return found != systems.end() && (found->second == "tmpfs" || found->second == "hugetlbfs");
}

// Whether the kernel allows long-term pinning of these bytes for writing: not for shared file mappings, except shared
// memory.
bool may_be_pinned(std::uintptr_t start, std::size_t bytes) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::uintptr_t from = 0, end = 0;
    char rights[5] = {};
    unsigned major = 0, minor = 0;
    unsigned long inode = 0;
    int name = 0;
    const int read =
        std::sscanf(line.c_str(), "%lx-%lx %4s %*x %x:%x %lu %n", &from, &end, rights, &major, &minor, &inode, &name);
    if (read < 6) die("/proc/self/maps has a line that is not understood: %s", line.c_str());
    if (from >= start + bytes || end <= start || inode == 0 || rights[3] != 's') continue;
    if (!is_shared_memory(line.substr(static_cast<std::size_t>(name)), major, minor)) return false;
  }
  return true;
}

KeepAlive pinned(Kind kind, void* host, std::size_t bytes, Context* context) {
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
  if (!is_mapped(number_of(host), bytes) || !may_be_pinned(number_of(host), bytes)) return CUDA_ERROR_INVALID_VALUE;
  const bool added = add_region(pinned(Kind::kRegistered, host, bytes, context));
  return added ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
}

FAKE_API CUresult cuMemHostUnregister(void* host) {
  Context* context = nullptr;
  if (const CUresult refused = need_context(&context)) return refused;
  wait_if_calls_block(*context);
  const KeepAlive region = remove_region(number_of(host), {Kind::kRegistered});
  return region != nullptr ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

FAKE_API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* address, void* host, unsigned flags) {
  Context* context = nullptr;
  if (const CUresult refused = need_context(&context)) return refused;
  const KeepAlive region = find_region(number_of(host), 1);
  if (address == nullptr || flags != 0 || region == nullptr || !region->pinned()) return CUDA_ERROR_INVALID_VALUE;
  *address = number_of(host) + kOffset;
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuMemHostAlloc(void** host, std::size_t bytes, unsigned flags) {
  Context* context = nullptr;
  if (const CUresult refused = need_context(&context)) return refused;
  if (host == nullptr || bytes == 0 || flags > 7) return CUDA_ERROR_INVALID_VALUE;
  wait_if_calls_block(*context);
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
  wait_if_calls_block(*context);
  return remove_region(number_of(host), {Kind::kHostAlloc}) != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
