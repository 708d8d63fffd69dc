#include "comm_timer.h"

#include <unordered_map>

namespace dl_comm::torch_ops {
namespace {

struct Timers {
  std::mutex mutex;
  std::unordered_map<uint64_t, std::shared_ptr<CommTimer>> by_owner;
};

// Never destroyed: calls may still be in flight while the process exits.
Timers& timers() {
  static Timers* const instance = new Timers;
  return *instance;
}

}  // namespace

void CommTimer::begin() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (in_flight_++ == 0) since_ = std::chrono::steady_clock::now();
}

void CommTimer::end() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (--in_flight_ == 0) total_ += std::chrono::steady_clock::now() - since_;
}

double CommTimer::take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (in_flight_ > 0) {
    const auto now = std::chrono::steady_clock::now();
    total_ += now - since_;
    since_ = now;
  }
  const double seconds = total_.count();
  total_ = total_.zero();
  return seconds;
}

std::shared_ptr<CommTimer> timer_of(uint64_t owner) {
  Timers& all = timers();
  const std::lock_guard<std::mutex> lock(all.mutex);
  auto& timer = all.by_owner[owner];
  if (!timer) timer = std::make_shared<CommTimer>();
  return timer;
}

double take_comm_seconds(uint64_t owner) {
  Timers& all = timers();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.by_owner.find(owner);
  if (found == all.by_owner.end()) return 0;
  const double seconds = found->second->take();
  if (found->second.use_count() == 1) all.by_owner.erase(found);
  return seconds;
}

}  // namespace dl_comm::torch_ops
