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

bool slices_enabled() {
  static const bool on = setting("FAKE_CUDA_TIME_SLICES", 0) != 0;
  return on;
}

// The number of kernels running on a device, and the device's lock while there are any. The lock is an abstract socket
// name, which one process can bind and the kernel releases at its exit.
struct Running {
  std::mutex mutex;
  int kernels = 0;
  int lock_fd = -1;
};

Running& running(int device) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  return never_destroyed<std::map<int, Running>>()[device];
}

int bind_lock(int device) {
  const int lock_fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (lock_fd < 0) die("no socket for a time slice: %s", std::strerror(errno));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  const int length = std::snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "fake_cuda.kernels.%d", device);
  const auto bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<std::size_t>(length));
  for (int round = 0; bind(lock_fd, reinterpret_cast<const sockaddr*>(&address), bytes) != 0; backoff(round)) {
    if (errno != EADDRINUSE) die("a time slice cannot be had: %s", std::strerror(errno));
  }
  return lock_fd;
}

}  // namespace

Slice::Slice(int device) : device_(device) {
  if (!slices_enabled()) return;
  Running& here = running(device);
  const std::lock_guard lock(here.mutex);
  if (here.kernels++ == 0) here.lock_fd = bind_lock(device);
}

Slice::~Slice() {
  if (!slices_enabled()) return;
  Running& here = running(device_);
  const std::lock_guard lock(here.mutex);
  if (--here.kernels == 0) close(here.lock_fd);
}

}  // namespace fake
