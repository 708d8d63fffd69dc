// The table of memory: see memory.h.
#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>

#include "die.h"

namespace fake {
namespace {

struct Table {
  std::mutex mutex;
  std::map<std::uintptr_t, Held> regions;
  unsigned long long last_id = 0;
};

Table& table() { return immortal<Table>(); }

// What a process leaves in /dev/shm goes when it exits; files of a killed one go at the next cuInit of anybody.
__attribute__((destructor)) void unlink_all() {
  if (need_init() != CUDA_SUCCESS) return;
  const std::lock_guard lock(table().mutex);
  for (const auto& [start, region] : table().regions) {
    if (region->kind == Kind::kDevice) unlink_file(region->file);
  }
}

}  // namespace

Region::~Region() {
  if (mapped()) munmap(reinterpret_cast<void*>(start), bytes);
}

bool add_region(const Held& region) {
  const std::lock_guard lock(table().mutex);
  auto& regions = table().regions;
  const auto next = regions.lower_bound(region->start);
  if (next != regions.end() && next->first < region->start + region->bytes) return false;
  if (next != regions.begin()) {
    const Region& before = *std::prev(next)->second;
    if (before.start + before.bytes > region->start) return false;
  }
  region->id = ++table().last_id;
  regions.emplace(region->start, region);
  return true;
}

Held find_region(std::uintptr_t start, std::size_t bytes) {
  const std::lock_guard lock(table().mutex);
  const auto& regions = table().regions;
  auto found = regions.upper_bound(start);
  if (found == regions.begin()) return nullptr;
  const Held& region = (--found)->second;
  const std::size_t offset = start - region->start;
  return offset < region->bytes && bytes <= region->bytes - offset ? region : nullptr;
}

Held remove_region(std::uintptr_t start, Kind kind) {
  const std::lock_guard lock(table().mutex);
  const auto found = table().regions.find(start);
  if (found == table().regions.end() || found->second->kind != kind) return nullptr;
  Held region = std::move(found->second);
  table().regions.erase(found);
  return region;
}

std::size_t bytes_in_use(int device) {
  const std::lock_guard lock(table().mutex);
  std::size_t sum = 0;
  for (const auto& [start, region] : table().regions) {
    if (region->kind == Kind::kDevice && region->device == device) sum += region->bytes;
  }
  return sum;
}

Held device_memory(CUdeviceptr address, std::size_t bytes, const char* what) {
  Held region = address < kOffset ? nullptr : find_region(address - kOffset, bytes);
  if (region == nullptr) die("%s: %zu bytes at %#llx are no device memory", what, bytes, address);
  return region;
}

Held pinned_memory(const void* host, std::size_t bytes, const char* what) {
  Held region = find_region(number_of(host), bytes);
  if (region == nullptr || !region->pinned()) die("%s: %zu bytes at %p are no pinned host memory", what, bytes, host);
  return region;
}

char* map_file(const std::string& file, std::size_t bytes, bool create) {
  const int fd = shm_open(("/" + file).c_str(), O_RDWR | O_CLOEXEC | (create ? O_CREAT | O_EXCL : 0), 0600);
  if (fd < 0) return nullptr;
  void* start = MAP_FAILED;
  if (!create || posix_fallocate(fd, 0, static_cast<off_t>(bytes)) == 0) {
    start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  close(fd);
  if (create && start == MAP_FAILED) unlink_file(file);
  if (start == MAP_FAILED) return nullptr;
  if (create) std::memset(start, 0xff, bytes);
  return static_cast<char*>(start);
}

void unlink_file(const std::string& file) { shm_unlink(("/" + file).c_str()); }

}  // namespace fake
