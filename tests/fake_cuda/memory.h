// The table of memory that the fake's GPUs know: device memory, memory of other processes, and pinned host memory.
//
// A device address is the address of the mapping plus 2^60, an invalid address: host code that accesses device memory
// crashes. Only the fake subtracts the offset. Thread rule: any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "context.h"
#include "cuda_api.h"

namespace fake {

constexpr CUdeviceptr kOffset = 1ull << 60;
// Memory size of every device.
constexpr std::size_t kDeviceBytes = std::size_t{8} << 30;
// Prefix of the files in /dev/shm that back device memory; the process id, a dot and a number follow.
constexpr const char* kFilePrefix = "fake_cuda.";

// Device memory: from cuMemAlloc, of a pool, managed (invalid on the host here), a mapped chunk, several adjacent
// chunks, or opened from another process. Host memory: registered, or from cuMemHostAlloc.
enum class Kind { kDevice, kPool, kManaged, kChunk, kChunks, kOpened, kRegistered, kHostAlloc };

// The file that backs device memory. Thread rule: immutable.
class Backing {
 public:
  // Creates a file filled with 0xff, so that no caller relies on zeros. Does not check the device's size. Null if
  // /dev/shm is full.
  static std::shared_ptr<Backing> create(int device, std::size_t bytes);
  // The file of another process; `map` fails if it does not exist.
  static std::shared_ptr<Backing> open(const std::string& file, int device, std::size_t bytes);
  // Frees memory that this process created; it stays in use while other processes have it open.
  ~Backing();
  Backing(const Backing&) = delete;
  Backing& operator=(const Backing&) = delete;

  // Maps the file at an address from reserve_addresses; false if the file is gone.
  bool map(std::uintptr_t start) const;

  const std::string file;
  const int device;
  const std::size_t bytes;

 private:
  Backing(std::string file, int device, std::size_t bytes, bool own)
      : file(std::move(file)), device(device), bytes(bytes), own_(own) {}

  const bool own_;
};

// A memory range, which unmaps its memory when destroyed. A running operation holds its regions.
struct Region {
  Kind kind = Kind::kDevice;
  std::uintptr_t start = 0;
  std::size_t bytes = 0;
  int device = 0;
  // The context that allocated, opened or registered it.
  Context* context = nullptr;
  // Set by add_region; unique in the process.
  unsigned long long id = 0;
  // The backing file, if there is exactly one.
  std::shared_ptr<Backing> backing;
  // The adjacent chunks of a kChunks region.
  std::vector<std::shared_ptr<Region>> chunks;

  // Whether cuMemFree accepts it.
  bool allocated() const { return kind == Kind::kDevice || kind == Kind::kPool || kind == Kind::kManaged; }
  bool pinned() const { return kind == Kind::kRegistered || kind == Kind::kHostAlloc; }
  CUdeviceptr address() const { return start + kOffset; }
  ~Region();
};
using KeepAlive = std::shared_ptr<Region>;

inline char* host_of(CUdeviceptr address) { return reinterpret_cast<char*>(address - kOffset); }
inline std::uintptr_t number_of(const void* host) { return reinterpret_cast<std::uintptr_t>(host); }

// False, without effect, if the region overlaps another.
bool add_region(const KeepAlive& region);
// The region that contains all these bytes; null if none.
KeepAlive find_region(std::uintptr_t start, std::size_t bytes);
// Removes the region of one of these kinds that starts there; null if none.
KeepAlive remove_region(std::uintptr_t start, std::initializer_list<Kind> kinds);
// Bytes of the device that this process uses, including freed memory that other processes have open.
std::size_t bytes_in_use(int device);

// The region that contains this device memory; adjacent chunks count as one. Otherwise a bad access (faults.h), naming
// `what`.
KeepAlive device_memory(CUdeviceptr address, std::size_t bytes, const char* what);
// The same for pinned host memory.
KeepAlive pinned_memory(const void* host, std::size_t bytes, const char* what);

// Allocates device memory; null if the device is full.
std::shared_ptr<Backing> new_backing(int device, std::size_t bytes);
// Allocates memory of this kind on the context's device and adds it to the table; null if the device is full.
KeepAlive new_memory(Kind kind, std::size_t bytes, Context* context);
// Maps the file as a region, which is not yet in the table; null if the file is gone.
KeepAlive mapped_region(Kind kind, const std::shared_ptr<Backing>& backing, Context* context);

// Reserves the lowest free addresses, so addresses of freed memory are reused at once, as by the driver. Unreadable
// until mapped.
std::uintptr_t reserve_addresses(std::size_t bytes);
// Unmaps the range.
void cover_addresses(std::uintptr_t start, std::size_t bytes);
// Unmaps the range and frees its addresses.
void release_addresses(std::uintptr_t start, std::size_t bytes);

}  // namespace fake
