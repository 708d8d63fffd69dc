// The table of all memory that the fake's GPUs know: their own, that of other processes, and pinned memory of the host.
//
// A device address is the address of the mapping plus 2^60, which no processor can follow: who touches device memory
// from the host dies at once. Only the fake takes the offset off. Thread rule: everything may be called from any
// thread.
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
// What every device pretends to have.
constexpr std::size_t kDeviceBytes = std::size_t{8} << 30;
// Allocations of devices are files of this name, then the process, a dot and a number, in /dev/shm.
constexpr const char* kFilePrefix = "fake_cuda.";

// Memory of a device: of cuMemAlloc, of a pool, managed (here no memory of the host: who touches it there dies too), a
// mapped chunk, several of these side by side, of another process. Memory of the host: registered, of cuMemHostAlloc.
enum class Kind { kDevice, kPool, kManaged, kChunk, kChunks, kOpened, kRegistered, kHostAlloc };

// The file behind memory of a device. Thread rule: it does not change.
class Backing {
 public:
  // A new one, whatever the device has; all bytes are 0xff: nobody may count on zeros. Null when there is no room.
  static std::shared_ptr<Backing> create(int device, std::size_t bytes);
  // That of another process; null when there is none.
  static std::shared_ptr<Backing> open(const std::string& file, int device, std::size_t bytes);
  // Gives what this process has made back; while others have it open, it stays in use.
  ~Backing();
  Backing(const Backing&) = delete;
  Backing& operator=(const Backing&) = delete;

  // Maps it at an address of reserve_addresses; false when there is no such file any more.
  bool map(std::uintptr_t start) const;

  const std::string file;
  const int device;
  const std::size_t bytes;

 private:
  Backing(std::string file, int device, std::size_t bytes, bool own)
      : file(std::move(file)), device(device), bytes(bytes), own_(own) {}

  const bool own_;
};

// A range of memory. What the fake has mapped goes with it: an operation under way holds on to its regions.
struct Region {
  Kind kind = Kind::kDevice;
  std::uintptr_t start = 0;
  std::size_t bytes = 0;
  int device = 0;
  // Where it was allocated, opened or registered.
  Context* context = nullptr;
  // Set by add_region: never the same twice in a process.
  unsigned long long id = 0;
  // What is behind it, where that is one file.
  std::shared_ptr<Backing> backing;
  // What it is made of: kChunks.
  std::vector<std::shared_ptr<Region>> chunks;

  // Whether cuMemFree takes it.
  bool allocated() const { return kind == Kind::kDevice || kind == Kind::kPool || kind == Kind::kManaged; }
  bool pinned() const { return kind == Kind::kRegistered || kind == Kind::kHostAlloc; }
  CUdeviceptr address() const { return start + kOffset; }
  ~Region();
};
using Held = std::shared_ptr<Region>;

inline char* host_of(CUdeviceptr address) { return reinterpret_cast<char*>(address - kOffset); }
inline std::uintptr_t number_of(const void* host) { return reinterpret_cast<std::uintptr_t>(host); }

// False, and nothing is added, when it overlaps with another.
bool add_region(const Held& region);
// The region that has all these bytes; null when there is none.
Held find_region(std::uintptr_t start, std::size_t bytes);
// Takes out the region of one of these kinds that starts there; null when there is none.
Held remove_region(std::uintptr_t start, std::initializer_list<Kind> kinds);
// What this process has on this device now, with what it has freed and others have open still.
std::size_t bytes_in_use(int device);

// The region of memory that a GPU may touch, which may be several chunks; a bad access (faults.h), naming `what`, when
// this is none.
Held device_memory(CUdeviceptr address, std::size_t bytes, const char* what);
// The same for pinned memory of the host.
Held pinned_memory(const void* host, std::size_t bytes, const char* what);

// Takes memory of a device; null when there is no room.
std::shared_ptr<Backing> new_backing(int device, std::size_t bytes);
// New memory of this kind on the context's device, known to the table; null when there is no room.
Held new_memory(Kind kind, std::size_t bytes, Context* context);
// A region of this kind with the backing mapped, not yet added; null when there is no such file any more.
Held mapped_region(Kind kind, const std::shared_ptr<Backing>& backing, Context* context);

// Addresses for memory of devices: the lowest that are free, so that those of freed memory come again at once, as they
// do with the driver. Nothing can be read there before it is mapped.
std::uintptr_t reserve_addresses(std::size_t bytes);
// Unmaps what is there.
void cover_addresses(std::uintptr_t start, std::size_t bytes);
// Also gives them back.
void release_addresses(std::uintptr_t start, std::size_t bytes);

}  // namespace fake
