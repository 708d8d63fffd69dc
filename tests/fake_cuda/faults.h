// Sticky errors, after which all calls of the process fail: an illegal memory access, and the shutdown of the driver.
//
// By default an illegal access aborts, so the backtrace shows the caller. With FAKE_CUDA_FAULTS=1 an illegal access by
// a stream's operation acts as on a GPU: no further operation runs, and every later call returns the same error.
// Thread rule: any thread.
#pragma once

#include "cuda_api.h"

namespace fake {

// The sticky error, or CUDA_SUCCESS.
CUresult fault();
// Marks the driver as shut down.
void deinitialise();

// Runs an operation of a stream, unless there is a sticky error.
template <class Function>
void run_or_fault(const Function& operation);

// Reports an illegal access: ends the calling thread's operation, or dies with this message.
[[noreturn]] void bad_access(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Thrown by bad_access, for run_or_fault.
struct Fault {};
// Sets whether the calling thread runs an operation.
void set_running(bool running);
void set_fault();

template <class Function>
void run_or_fault(const Function& operation) {
  if (fault() != CUDA_SUCCESS) return;
  set_running(true);
  try {
    operation();
  } catch (const Fault&) {
    set_fault();
  }
  set_running(false);
}

}  // namespace fake
