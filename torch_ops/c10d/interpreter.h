// The GIL, without Python's headers: one library serves every Python of a torch version.
#pragma once

namespace dl_comm::c10d_backend {

// While it lives, this thread does not hold the GIL, if it did.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

  // Whether this thread held the GIL: the caller is Python code.
  bool had_gil() const { return state_ != nullptr; }

 private:
  void* state_ = nullptr;
};

}  // namespace dl_comm::c10d_backend
