// Communication time of one owner.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>

namespace dl_comm::torch_ops {

// Adds up the time with at least one call in flight: overlapping calls count once.
//
// Thread rule: any thread may call everything.
class CommTimer {
 public:
  void begin();
  void end() noexcept;

  // The seconds since the last `take`; a call in flight counts up to now.
  double take();

 private:
  using Time = std::chrono::steady_clock::time_point;

  std::mutex mutex_;
  int64_t in_flight_ = 0;
  Time since_;
  std::chrono::duration<double> total_{0};
};

// The timer of this owner; creates it if needed.
std::shared_ptr<CommTimer> timer_of(uint64_t owner);

// The seconds of this owner's timer since the last call. Drops a timer without other references.
double take_comm_seconds(uint64_t owner);

}  // namespace dl_comm::torch_ops
