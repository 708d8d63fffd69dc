// The table of all memory that the fake's GPUs know: their own, that of other processes, and pinned memory of the host.
//
// A device address is the address of the mapping plus 2^60, which no processor can follow: who touches device memory
// from the host dies at once. Only the fake takes the offset off. Thread rule: everything may be called from any
// thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "context.h"
#include "cuda_api.h"

namespace fake {

constexpr CUdeviceptr kOffset = 1ull << 60;
// What every device pretends to have.
constexpr std::size_t kDeviceBytes = std::size_t{8} << 30;
// Allocations of devices are files of this name, then the process, a dot and a number, in /dev/shm.
constexpr const char* kFilePrefix = "fake_cuda.";

enum class Kind { kDevice, kOpened, kRegistered, kHostAlloc };

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
  // The file behind it: kDevice and kOpened.
  std::string file;
  // How often it was opened: kOpened, guarded by the lock of ipc.cc.
  int opened = 0;

  bool pinned() const { return kind == Kind::kRegistered || kind == Kind::kHostAlloc; }
  bool mapped() const { return kind != Kind::kRegistered; }
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
// Takes out the region of this kind that starts there; null when there is none.
Held remove_region(std::uintptr_t start, Kind kind);
// What is allocated on this device now.
std::size_t bytes_in_use(int device);

// The region of memory that a GPU may touch; dies, naming `what`, when this is none.
Held device_memory(CUdeviceptr address, std::size_t bytes, const char* what);
// The same for pinned memory of the host.
Held pinned_memory(const void* host, std::size_t bytes, const char* what);

// Maps the file; with `create` it is made, of these bytes, which are all 0xff: nobody may count on zeros. Null when
// there is no room, or no such file.
char* map_file(const std::string& file, std::size_t bytes, bool create);
void unlink_file(const std::string& file);

}  // namespace fake
