// How the core tells an op library that a call has ended.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "rust/cxx.h"

namespace dl_comm {

// The memory of an average that may return before it has ended (a team on a non-blocking schedule,
// core/src/plugin/schedule.rs): it owns everything that the call reads and writes, and the call after next may still
// use it. What a call returns may lie in the `ResultBuffer` of an earlier call on the same list of tensors.
//
// Thread rule: made by the binding; afterwards used and destroyed on any thread. Nothing throws.
class ResultBuffer {
 public:
  virtual ~ResultBuffer() = default;

  // The same number for all of one op library, different for others: one library cannot take the results of another.
  virtual std::size_t owner_type() const noexcept = 0;

  // Before the results of a separate call are handed out: how much of the call's own mean, which is then where its own
  // tensors are written, and of these tensors its result is made of.
  virtual void set_weights(double own, double here) const noexcept = 0;

  // New results with tensors of the same types and shapes, all zero, whose addresses are appended to `addresses`. Null
  // when there is no memory.
  virtual std::shared_ptr<ResultBuffer> zeros_like(rust::Vec<std::size_t>& addresses) const noexcept = 0;
};

// One call's end. The op library derives from it, keeps in it everything that must outlive the call (the tensors'
// storage above all) and hands it to the core, which calls `done` exactly once and then destroys it.
//
// Thread rule: `done` and the destructor run on a thread of the team, or, when the call is refused at once (bad
// arguments, not initialised) or has its result at once, on the calling thread before the call returns. They must not
// block and must not throw; `done` may submit further calls.
class Completion {
 public:
  virtual ~Completion() = default;

  // `code` is 0 when the call's results are there: in `results`, or, when that is null, where the call's own tensors
  // are written. Else it is one of the DL_COMM_ERROR_* codes of dl_comm.h; `message` then says what happened, and no
  // result was written unless the message says otherwise.
  virtual void done(int32_t code, rust::Str message, std::shared_ptr<ResultBuffer> results) const noexcept = 0;
};

}  // namespace dl_comm
