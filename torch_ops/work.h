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

#include "comm_timer.h"
#include "device_stream.h"
#include "dl_comm_core/src/ffi.rs.h"

namespace dl_comm::torch_ops {

// The memory of a call that may return before its average has ended: tensors that nobody else uses.
class TensorResults final : public Results {
 public:
  TensorResults(std::vector<::torch::stable::Tensor> tensors, DeviceStream device_stream)
      : tensors(std::move(tensors)), device_stream(device_stream) {}

  std::size_t kind() const noexcept override;
  void settle(double own, double here) const noexcept override;
  std::shared_ptr<Results> blank(rust::Vec<std::size_t>& addresses) const noexcept override;

  std::vector<::torch::stable::Tensor> tensors;
  // Where they are, and who uses them.
  const DeviceStream device_stream;
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
class Work {
 public:
  // `wait_time_team`: the team that is told how long `wait` has blocked; -1 for calls whose time the core takes.
  // `timer`, if any, runs from here to the end of the call, which must be started.
  Work(std::vector<::torch::stable::Tensor> tensors, DeviceStream device_stream, int32_t wait_time_team,
       std::shared_ptr<CommTimer> timer = nullptr)
      : tensors_(std::move(tensors)),
        device_stream_(device_stream),
        wait_time_team_(wait_time_team),
        timer_(std::move(timer)) {
    if (timer_) timer_->begin();
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
  const DeviceStream device_stream_;
  const int32_t wait_time_team_;
  std::shared_ptr<CommTimer> timer_;
};

// What the core gets to end `work`'s call.
std::unique_ptr<Completion> completion_of(std::shared_ptr<Work> work);

// Gives `work` a number (from 1) for Python to hold. Frees detached works whose calls have ended meanwhile.
int64_t register_work(std::shared_ptr<Work> work);

// Takes the work with this number out. Throws std::runtime_error when there is none.
std::shared_ptr<Work> take_work(int64_t number);

// Withdraws a work for which nobody will wait; its tensors are kept until its call has ended.
void detach_work(int64_t number);

}  // namespace dl_comm::torch_ops
