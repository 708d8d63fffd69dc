// For how long calls of one owner are under way.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>

namespace dl_comm::torch_ops {

// Adds up the time in which at least one call is under way: calls that overlap count once.
//
// Thread rule: everything may be called from any thread.
class CommTimer {
 public:
  void begin();
  void end() noexcept;

  // The seconds since this was asked last; what is under way counts up to now.
  double take();

 private:
  using Time = std::chrono::steady_clock::time_point;

  std::mutex mutex_;
  int64_t in_flight_ = 0;
  Time since_;
  std::chrono::duration<double> total_{0};
};

// The timer of this owner; made when there is none.
std::shared_ptr<CommTimer> timer_of(uint64_t owner);

// The seconds of this owner's timer since this was asked last. A timer that nobody else holds goes.
double take_comm_seconds(uint64_t owner);

}  // namespace dl_comm::torch_ops
