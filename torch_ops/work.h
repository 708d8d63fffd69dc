// Calls in flight: their completion, and the tensors that must live until then.
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

namespace dl_comm::torch_ops {

// The memory of a call that may return before its allreduce ends: tensors with no other user.
class TensorResults final : public ResultBuffer {
 public:
  TensorResults(std::vector<::torch::stable::Tensor> tensors, DeviceStream device_stream)
      : tensors(std::move(tensors)), device_stream(device_stream) {}

  void set_weights(double own, double here) const noexcept override;
  std::shared_ptr<ResultBuffer> zeros_like(rust::Vec<std::size_t>& addresses) const noexcept override;

  std::vector<::torch::stable::Tensor> tensors;
  const DeviceStream device_stream;
  // Weights of the call's tensors and of `tensors` in the result; set by `set_weights`.
  mutable double own_share = 0;
  mutable double share = 1;
};

// The result of a call: own_share * (the call's own tensors) + share * `tensors`. Without `tensors` the result is in
// the call's own tensors.
struct Outcome {
  std::vector<::torch::stable::Tensor> tensors;
  double own_share = 1;
  double share = 0;
};

// What a receive has received.
struct Status {
  int32_t source = -1;
  int32_t tag = -1;
  std::size_t bytes = 0;
};

// One call in flight, as c10d's Work. It releases the call's tensors in `wait` or its destructor. A core thread that
// freed one would need the GIL.
//
// Thread rule: the core calls `finish` once, from any thread; any thread may call the rest.
class Work {
 public:
  // `wait_time_team`: `wait` adds its blocked time to this team's; -1 when the core measures it.
  // `timer` may be null; it runs until `finish`, so the caller must start the call.
  Work(std::vector<::torch::stable::Tensor> tensors, DeviceStream device_stream, int32_t wait_time_team,
       std::shared_ptr<CommTimer> timer = nullptr)
      : tensors_(std::move(tensors)),
        device_stream_(device_stream),
        wait_time_team_(wait_time_team),
        timer_(std::move(timer)) {
    if (timer_) timer_->begin();
  }

  void finish(int32_t code, std::string message, std::shared_ptr<ResultBuffer> results) noexcept;
  void receive(Status status) noexcept;
  bool finished() const noexcept;

  // What the call has received, if it is a receive that has ended.
  Status status() const;

  // Blocks until the call completes, at most `seconds` (0: no limit). Returns whether it has.
  bool wait_for(double seconds);

  // Blocks until the call completes. On a GPU: until torch's current stream is ordered after the result.
  // Throws the call's Error if it failed; on a GPU, also that of a call that was lost after its end.
  Outcome wait();

 private:
  mutable std::mutex mutex_;
  std::condition_variable ended_;
  bool finished_ = false;
  int32_t code_ = 0;
  std::string message_;
  Status status_;
  std::shared_ptr<ResultBuffer> results_;
  std::vector<::torch::stable::Tensor> tensors_;
  const DeviceStream device_stream_;
  const int32_t wait_time_team_;
  std::shared_ptr<CommTimer> timer_;
};

// The callback by which the core completes `work`.
std::unique_ptr<Completion> completion_of(std::shared_ptr<Work> work);

// Returns a number (from 1) for Python to hold. Also frees detached works whose calls have completed.
int64_t register_work(std::shared_ptr<Work> work);

// The work with this number, which stays in the registry. Throws an Error if there is none.
std::shared_ptr<Work> find_work(int64_t number);

// Removes the work with this number from the registry. Throws an Error if there is none.
std::shared_ptr<Work> take_work(int64_t number);

// Removes this work from the registry without a wait; its tensors stay alive until its call completes.
void detach_work(int64_t number);

}  // namespace dl_comm::torch_ops
