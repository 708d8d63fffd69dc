// How the core tells an op library that a call has ended.
#pragma once

#include <cstdint>

#include "rust/cxx.h"

namespace dl_comm {

// One call's end. The op library derives from it, keeps in it everything that must outlive the call (the tensors'
// storage above all) and hands it to the core, which calls `done` exactly once and then destroys it.
//
// Thread rule: `done` and the destructor run on a thread of the team, or, when the call is refused at once (bad
// arguments, not initialised), on the calling thread before the call returns. They must not block and must not throw;
// `done` may submit further calls.
class Completion {
 public:
  virtual ~Completion() = default;

  // `code` is 0 when the results are in place, else one of the DL_COMM_ERROR_* codes of dl_comm.h; `message` then
  // says what happened, and no result was written unless the message says otherwise.
  virtual void done(int32_t code, rust::Str message) const noexcept = 0;
};

}  // namespace dl_comm
