// The table of memory: see memory.h.
#include "memory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

#include "abort.h"
#include "counters.h"
#include "faults.h"

namespace fake {
namespace {

struct Table {
  std::mutex mutex;
  std::map<std::uintptr_t, KeepAlive> regions;
  unsigned long long last_id = 0;
};

Table& table() { return never_destroyed<Table>(); }

// Memory that this process has freed and others have open: the unlinked file.
struct Freed {
  int fd;
  int device;
  std::size_t bytes;
};

// The files of this process, and the bytes per device in them and in freed ones that are still open elsewhere.
struct Files {
  std::mutex mutex;
  std::set<std::string> names;
  std::map<int, std::size_t> bytes;
  std::vector<Freed> freed;
};

// A process that maps the file of another one holds a shared lock on it while the mapping exists.
bool is_open_elsewhere(int fd) { return flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK; }

Files& files() { return never_destroyed<Files>(); }

void unlink_file(const std::string& file) { shm_unlink(("/" + file).c_str()); }

// Unlinks this process's files at exit. The next cuInit of any process removes those of a killed one.
__attribute__((destructor)) void unlink_all() {
  const std::string own = kFilePrefix + std::to_string(getpid()) + ".";
  const std::lock_guard lock(files().mutex);
  for (const std::string& name : files().names) {
    if (name.rfind(own, 0) == 0) unlink_file(name);
  }
}

// The process's address range for device memory, and the used parts of it: end by start.
struct Addresses {
  static constexpr std::size_t kBytes = std::size_t{1} << 40;

  std::mutex mutex;
  std::uintptr_t start = 0;
  std::map<std::uintptr_t, std::uintptr_t> taken;

  Addresses() {
    void* range = mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) die("no addresses for memory of devices: %s", std::strerror(errno));
    start = number_of(range);
  }
};

Addresses& addresses() { return never_destroyed<Addresses>(); }

std::size_t whole_pages(std::size_t bytes) {
  static const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

}  // namespace

std::uintptr_t reserve_addresses(std::size_t bytes) {
  Addresses& all = addresses();
  const std::lock_guard lock(all.mutex);
  std::uintptr_t start = all.start;
  for (const auto& [from, end] : all.taken) {
    if (from - start >= whole_pages(bytes)) break;
    start = end;
  }
  if (start + bytes > all.start + Addresses::kBytes) die("no addresses for %zu bytes of device memory", bytes);
  all.taken[start] = start + whole_pages(bytes);
  return start;
}

void cover_addresses(std::uintptr_t start, std::size_t bytes) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  if (mmap(reinterpret_cast<void*>(start), bytes, PROT_NONE, flags, -1, 0) == MAP_FAILED) {
    die("device memory cannot be unmapped: %s", std::strerror(errno));
  }
}

void release_addresses(std::uintptr_t start, std::size_t bytes) {
  cover_addresses(start, bytes);
  const std::lock_guard lock(addresses().mutex);
  addresses().taken.erase(start);
}

std::shared_ptr<Backing> Backing::create(int device, std::size_t bytes) {
  static std::atomic<long> count{0};
  const std::string file = kFilePrefix + std::to_string(getpid()) + "." + std::to_string(++count);
  const int fd = shm_open(("/" + file).c_str(), O_RDWR | O_CLOEXEC | O_CREAT | O_EXCL, 0600);
  if (fd < 0) return nullptr;
  void* start = MAP_FAILED;
  if (posix_fallocate(fd, 0, static_cast<off_t>(bytes)) == 0) {
    start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  close(fd);
  if (start == MAP_FAILED) {
    unlink_file(file);
    return nullptr;
  }
  std::memset(start, 0xff, bytes);
  munmap(start, bytes);
  const std::lock_guard lock(files().mutex);
  files().names.insert(file);
  files().bytes[device] += bytes;
  return std::shared_ptr<Backing>(new Backing(file, device, bytes, true));
}

std::shared_ptr<Backing> Backing::open(const std::string& file, int device, std::size_t bytes) {
  return std::shared_ptr<Backing>(new Backing(file, device, bytes, false));
}

Backing::~Backing() {
  if (!own_) return;
  const std::lock_guard lock(files().mutex);
  const int fd = shm_open(("/" + file).c_str(), O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0) die("%s is gone: %s", file.c_str(), std::strerror(errno));
  unlink_file(file);
  files().names.erase(file);
  if (is_open_elsewhere(fd)) {
    files().freed.push_back({fd, device, bytes});
    return;
  }
  close(fd);
  files().bytes[device] -= bytes;
}

bool Backing::map(std::uintptr_t start) const {
  const int fd = shm_open(("/" + file).c_str(), O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0) return false;
  if (!own_ && flock(fd, LOCK_SH) != 0) die("%s cannot be locked: %s", file.c_str(), std::strerror(errno));
  void* mapped = mmap(reinterpret_cast<void*>(start), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
  close(fd);
  return mapped != MAP_FAILED;
}

Region::~Region() {
  switch (kind) {
    case Kind::kDevice:
    case Kind::kPool:
    case Kind::kManaged:
    case Kind::kOpened:
      release_addresses(start, bytes);
      break;
    case Kind::kHostAlloc:
      munmap(reinterpret_cast<void*>(start), bytes);
      break;
    case Kind::kChunk:
      cover_addresses(start, bytes);
      break;
    case Kind::kChunks:
    case Kind::kRegistered:
      break;
  }
}

std::shared_ptr<Backing> new_backing(int device, std::size_t bytes) {
  if (bytes > kDeviceBytes - bytes_in_use(device)) return nullptr;
  auto backing = Backing::create(device, bytes);
  if (backing != nullptr) ++counters().allocations;
  return backing;
}

KeepAlive new_memory(Kind kind, std::size_t bytes, Context* context) {
  const auto backing = new_backing(context->device, bytes);
  if (backing == nullptr) return nullptr;
  const KeepAlive region = mapped_region(kind, backing, context);
  if (region == nullptr || !add_region(region)) die("new memory of a device cannot be mapped");
  return region;
}

KeepAlive mapped_region(Kind kind, const std::shared_ptr<Backing>& backing, Context* context) {
  auto region = std::make_shared<Region>();
  region->kind = kind;
  region->start = reserve_addresses(backing->bytes);
  region->bytes = backing->bytes;
  region->device = backing->device;
  region->context = context;
  region->backing = backing;
  return backing->map(region->start) ? region : nullptr;
}

bool add_region(const KeepAlive& region) {
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

KeepAlive find_region(std::uintptr_t start, std::size_t bytes) {
  const std::lock_guard lock(table().mutex);
  const auto& regions = table().regions;
  auto found = regions.upper_bound(start);
  if (found == regions.begin()) return nullptr;
  const KeepAlive& region = (--found)->second;
  const std::size_t offset = start - region->start;
  return offset < region->bytes && bytes <= region->bytes - offset ? region : nullptr;
}

KeepAlive remove_region(std::uintptr_t start, std::initializer_list<Kind> kinds) {
  const std::lock_guard lock(table().mutex);
  const auto found = table().regions.find(start);
  if (found == table().regions.end()) return nullptr;
  if (std::find(kinds.begin(), kinds.end(), found->second->kind) == kinds.end()) return nullptr;
  KeepAlive region = std::move(found->second);
  table().regions.erase(found);
  return region;
}

std::size_t bytes_in_use(int device) {
  const std::lock_guard lock(files().mutex);
  auto& freed = files().freed;
  const auto gone = std::remove_if(freed.begin(), freed.end(), [](const Freed& each) {
    if (is_open_elsewhere(each.fd)) return false;
    close(each.fd);
    files().bytes[each.device] -= each.bytes;
    return true;
  });
  freed.erase(gone, freed.end());
  return files().bytes[device];
}

namespace {

// The adjacent mapped chunks that contain all these bytes, as one region; null if there are none.
KeepAlive find_chunks(std::uintptr_t start, std::size_t bytes) {
  auto all = std::make_shared<Region>();
  all->kind = Kind::kChunks;
  for (std::uintptr_t at = start; at < start + bytes; at = all->start + all->bytes) {
    const KeepAlive chunk = find_region(at, 1);
    if (chunk == nullptr || chunk->kind != Kind::kChunk) return nullptr;
    if (all->chunks.empty()) {
      all->start = chunk->start;
      all->device = chunk->device;
      all->context = chunk->context;
    }
    if (chunk->device != all->device) return nullptr;
    all->bytes += chunk->bytes;
    all->chunks.push_back(chunk);
  }
  return all->chunks.empty() ? nullptr : all;
}

}  // namespace

KeepAlive device_memory(CUdeviceptr address, std::size_t bytes, const char* what) {
  KeepAlive region = address < kOffset ? nullptr : find_region(address - kOffset, bytes);
  if (region == nullptr && address >= kOffset) region = find_chunks(address - kOffset, bytes);
  if (region == nullptr) bad_access("%s: %zu bytes at %#llx are no device memory", what, bytes, address);
  return region;
}

KeepAlive pinned_memory(const void* host, std::size_t bytes, const char* what) {
  KeepAlive region = find_region(number_of(host), bytes);
  if (region == nullptr || !region->pinned())
    bad_access("%s: %zu bytes at %p are no pinned host memory", what, bytes, host);
  return region;
}

}  // namespace fake
