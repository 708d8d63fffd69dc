// The completion of a call: how the core reports a result to an op library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "rust/cxx.h"

namespace dl_comm {

// The memory of a call that may return before its allreduce completes (a team with a non-blocking schedule,
// core/src/plugin/schedule.rs). It owns everything that the call reads and writes. The second call after it may still
// use it. The result of a call may lie in the `ResultBuffer` of an earlier call on the same list of tensors.
//
// Thread rule: created by the binding; then used and destroyed on any thread. No method throws.
class ResultBuffer {
 public:
  virtual ~ResultBuffer() = default;

  // Identifies the op library: one library cannot use the results of another. Hidden, so that each has its own `mark`.
  __attribute__((visibility("hidden"))) virtual std::size_t owner_type() const noexcept {
    static const char mark = 0;
    return reinterpret_cast<std::size_t>(&mark);
  }

  // Sets the weights of the call's own mean (in the call's tensors) and of the mean in these tensors, for a caller that
  // adds them itself. Called before the results are returned.
  virtual void set_weights(double own, double here) const noexcept = 0;

  // Creates zeroed results with tensors of the same types and shapes, and appends their addresses to `addresses`. Null
  // if memory is exhausted.
  virtual std::shared_ptr<ResultBuffer> zeros_like(rust::Vec<std::size_t>& addresses) const noexcept = 0;
};

// Completion of one call. The op library derives from it and stores in it everything that must outlive the call, above
// all the tensors' storage. The core calls `done` exactly once and then destroys it.
//
// Thread rule: `done` and the destructor run on a thread of the team. If the call fails or completes at once, they run
// on the calling thread before the call returns. They must not block or throw; `done` may submit further calls.
class Completion {
 public:
  virtual ~Completion() = default;

  // `code` is 0 if the results are available: in `results`, or in the call's own tensors if `results` is null.
  // Otherwise `code` is a DL_COMM_ERROR_* code of dl_comm.h, and `message` describes the error. No result was written
  // unless the message says so.
  virtual void done(int32_t code, rust::Str message, std::shared_ptr<ResultBuffer> results) const noexcept = 0;

  // Called before `done` of a receive that succeeded: the source's rank in the group, the tag and the length.
  virtual void received(int32_t source, int32_t tag, std::size_t bytes) const noexcept {
    (void)source;
    (void)tag;
    (void)bytes;
  }
};

}  // namespace dl_comm
