// Calls that are under way: their end, and the tensors that must live until then.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "clock.h"
#include "dl_comm_core/src/ffi.rs.h"
#include "place.h"

namespace dl_comm::torch_ops {

// The memory of a call that may return before its average has ended: tensors that nobody else uses.
class TensorResults final : public Results {
 public:
  TensorResults(std::vector<::torch::stable::Tensor> tensors, Place place)
      : tensors(std::move(tensors)), place(place) {}

  std::size_t kind() const noexcept override;
  void settle(double own, double here) const noexcept override;
  std::shared_ptr<Results> blank(rust::Vec<std::size_t>& addresses) const noexcept override;

  std::vector<::torch::stable::Tensor> tensors;
  // Where they are, and who uses them.
  const Place place;
  // What `settle` has set.
  mutable double own_share = 0;
  mutable double share = 1;
};

// What a call came to: the tensors with its results, none when they are in the tensors that the call was to write. Of a
// separate call: its result is `own_share` of the latter and `share` of the former.
struct Outcome {
  std::vector<::torch::stable::Tensor> tensors;
  double own_share = 1;
  double share = 0;
};

// One call. It owns the call's tensors and gives them up in `wait`, or when whoever waits drops it, so that a tensor is
// hardly ever freed on a thread of the core: freeing one that Python knows takes the GIL.
//
// Thread rule: the core calls `finish` once, from any thread; everything else may be called from any thread.
class Ticket {
 public:
  // `counted_on`: the team that is told how long `wait` has blocked; -1 for calls whose time the core takes.
  // `clock`, if any, runs from here to the end of the call, which must be started.
  Ticket(std::vector<::torch::stable::Tensor> tensors, Place place, int32_t counted_on,
         std::shared_ptr<Clock> clock = nullptr)
      : tensors_(std::move(tensors)), place_(place), counted_on_(counted_on), clock_(std::move(clock)) {
    if (clock_) clock_->begin();
  }

  void finish(int32_t code, std::string message, std::shared_ptr<Results> results) noexcept;
  bool finished() const noexcept;

  // Blocks until the call has ended, on a GPU until torch's current stream will see the result.
  // Throws std::runtime_error "dl_comm error <code>: <message>" when it failed.
  Outcome wait();

 private:
  mutable std::mutex mutex_;
  std::condition_variable ended_;
  bool finished_ = false;
  int32_t code_ = 0;
  std::string message_;
  std::shared_ptr<Results> results_;
  std::vector<::torch::stable::Tensor> tensors_;
  const Place place_;
  const int32_t counted_on_;
  std::shared_ptr<Clock> clock_;
};

// What the core gets to end `ticket`'s call.
std::unique_ptr<Completion> completion_of(std::shared_ptr<Ticket> ticket);

// Gives `ticket` a number (from 1) for Python to hold. Frees forgotten tickets whose calls have ended meanwhile.
int64_t enroll(std::shared_ptr<Ticket> ticket);

// Takes the ticket with this number out. Throws std::runtime_error when there is none.
std::shared_ptr<Ticket> withdraw(int64_t number);

// Withdraws a ticket for which nobody will wait; its tensors are kept until its call has ended.
void forget(int64_t number);

}  // namespace dl_comm::torch_ops
