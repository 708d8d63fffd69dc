// See slices.h.
#include "slices.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>

#include "abort.h"

namespace fake {
namespace {

bool are_on() {
  static const bool on = setting("FAKE_CUDA_TIME_SLICES", 0) != 0;
  return on;
}

// The kernels that run on each device now, and the name of the device's slice while there are any: a socket of that
// name, which only one process can have, and which the kernel takes back from a process that ends.
struct Running {
  std::mutex mutex;
  int kernels = 0;
  int name = -1;
};

Running& running(int device) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  return immortal<std::map<int, Running>>()[device];
}

int take_name(int device) {
  const int name = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (name < 0) die("no socket for a time slice: %s", std::strerror(errno));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  const int length = std::snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "fake_cuda.kernels.%d", device);
  const auto bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<std::size_t>(length));
  for (int round = 0; bind(name, reinterpret_cast<const sockaddr*>(&address), bytes) != 0; nap(round)) {
    if (errno != EADDRINUSE) die("a time slice cannot be had: %s", std::strerror(errno));
  }
  return name;
}

}  // namespace

Slice::Slice(int device) : device_(device) {
  if (!are_on()) return;
  Running& here = running(device);
  const std::lock_guard lock(here.mutex);
  if (here.kernels++ == 0) here.name = take_name(device);
}

Slice::~Slice() {
  if (!are_on()) return;
  Running& here = running(device_);
  const std::lock_guard lock(here.mutex);
  if (--here.kernels == 0) close(here.name);
}

}  // namespace fake
