#include "interpreter.h"

#include <dlfcn.h>

namespace dl_comm::c10d_backend {
namespace {

// Functions of Python's stable ABI. All are null in a process without Python.
struct Interpreter {
  int (*is_held)() = reinterpret_cast<int (*)()>(::dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  void* (*release)() = reinterpret_cast<void* (*)()>(::dlsym(RTLD_DEFAULT, "PyEval_SaveThread"));
  void (*acquire)(void*) = reinterpret_cast<void (*)(void*)>(::dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"));
};

const Interpreter& interpreter() {
  static const Interpreter functions;
  return functions;
}

}  // namespace

WithoutGil::WithoutGil() {
  const auto& python = interpreter();
  if (python.is_held != nullptr && python.release != nullptr && python.acquire != nullptr && python.is_held() == 1)
    state_ = python.release();
}

WithoutGil::~WithoutGil() {
  if (state_ != nullptr) interpreter().acquire(state_);
}

}  // namespace dl_comm::c10d_backend
