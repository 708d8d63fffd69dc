// What makes all calls of the process fail: that it has touched memory that it may not touch, or that it is exiting.
//
// By default a bad access is an abort, which shows who asked. With FAKE_CUDA_FAULTS=1 one by an operation of a stream
// is what it is on a GPU: nothing runs any more, and every later call gives the same error. Thread rule: everything may
// be called from any thread.
#pragma once

#include "cuda_api.h"

namespace fake {

// The error that every call gives; CUDA_SUCCESS while all is well.
CUresult fault();
// From now on the driver is shut down.
void deinitialise();

// Runs an operation of a stream, unless there was a fault.
template <class Function>
void run_or_fault(const Function& operation);

// Ends the operation that the calling thread runs, or dies, with these words.
[[noreturn]] void bad_access(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Thrown by bad_access, for run_or_fault.
struct Fault {};
// Whether the calling thread runs an operation.
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
