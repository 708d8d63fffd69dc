// Calls that are under way: their end, and the tensors that must live until then.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "dl_comm/completion.h"

namespace dl_comm::torch_ops {

// One call. It owns the call's tensors and gives them up in `wait`, or when whoever waits drops it, so that a tensor is
// never freed on a thread of the core: freeing one that Python knows takes the GIL.
//
// Thread rule: the core calls `finish` once, from any thread; everything else may be called from any thread.
class Ticket {
 public:
  explicit Ticket(std::vector<::torch::stable::Tensor> tensors) : tensors_(std::move(tensors)) {}

  void finish(int32_t code, std::string message) noexcept;
  bool finished() const noexcept;

  // Blocks until the call has ended. Throws std::runtime_error "dl_comm error <code>: <message>" when it failed.
  void wait();

 private:
  mutable std::mutex mutex_;
  std::condition_variable ended_;
  bool finished_ = false;
  int32_t code_ = 0;
  std::string message_;
  std::vector<::torch::stable::Tensor> tensors_;
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
