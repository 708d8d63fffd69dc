// See abort.h.
#include "abort.h"

#include <dirent.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>

namespace fake {

void die(const char* format, ...) {
  char message[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  // One write, so that lines of several processes do not mix.
  const std::string line = std::string("fake_cuda: ") + message + "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);
  std::fflush(stderr);
  std::abort();
}

long setting(const char* name, long fallback) {
  const char* text = std::getenv(name);
  if (text == nullptr) return fallback;
  char* end = nullptr;
  errno = 0;
  const long value = std::strtol(text, &end, 10);
  if (end == text || *end != '\0' || errno != 0 || value < 0) die("%s is '%s', which is no number from 0", name, text);
  return value;
}

void random_delay() {
  static const long longest = setting("FAKE_CUDA_DELAY_US", 0);
  if (longest == 0) return;
  thread_local std::minstd_rand random(std::random_device{}());
  usleep(static_cast<useconds_t>(std::uniform_int_distribution<long>(0, longest)(random)));
}

void backoff(int& round) {
  usleep(round < 50 ? 10 : 200);
  ++round;
}

void remove_stale(const char* prefix) {
  DIR* folder = opendir("/dev/shm");
  if (folder == nullptr) die("/dev/shm cannot be read: %s", std::strerror(errno));
  while (const dirent* entry = readdir(folder)) {
    const std::string name = entry->d_name;
    if (name.rfind(prefix, 0) != 0) continue;
    const long pid = std::strtol(name.c_str() + std::strlen(prefix), nullptr, 10);
    if (pid > 0 && kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH) unlink(("/dev/shm/" + name).c_str());
  }
  closedir(folder);
}

}  // namespace fake
