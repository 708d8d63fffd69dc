// See faults.h.
#include "faults.h"

#include <atomic>
#include <cstdarg>
#include <cstdio>

#include "abort.h"

namespace fake {
namespace {

std::atomic<CUresult> error{CUDA_SUCCESS};
thread_local bool is_running = false;

}  // namespace

CUresult fault() { return error; }

// The first error is kept; only the shutdown overrides it.
void set_fault() {
  CUresult none = CUDA_SUCCESS;
  error.compare_exchange_strong(none, CUDA_ERROR_ILLEGAL_ADDRESS);
}

void deinitialise() { error = CUDA_ERROR_DEINITIALIZED; }

void set_running(bool running) { is_running = running; }

void bad_access(const char* format, ...) {
  if (is_running && setting("FAKE_CUDA_FAULTS", 0) != 0) throw Fault();
  char message[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  die("%s", message);
}

}  // namespace fake
