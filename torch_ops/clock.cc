#include "clock.h"

#include <unordered_map>

namespace dl_comm::torch_ops {
namespace {

struct Clocks {
  std::mutex mutex;
  std::unordered_map<uint64_t, std::shared_ptr<Clock>> by_owner;
};

// Never destroyed: calls may still be under way while the process exits.
Clocks& clocks() {
  static Clocks* const instance = new Clocks;
  return *instance;
}

}  // namespace

void Clock::begin() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (under_way_++ == 0) since_ = std::chrono::steady_clock::now();
}

void Clock::end() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (--under_way_ == 0) total_ += std::chrono::steady_clock::now() - since_;
}

double Clock::take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (under_way_ > 0) {
    const auto now = std::chrono::steady_clock::now();
    total_ += now - since_;
    since_ = now;
  }
  const double seconds = total_.count();
  total_ = total_.zero();
  return seconds;
}

std::shared_ptr<Clock> clock_of(uint64_t owner) {
  Clocks& all = clocks();
  const std::lock_guard<std::mutex> lock(all.mutex);
  auto& clock = all.by_owner[owner];
  if (!clock) clock = std::make_shared<Clock>();
  return clock;
}

double take_busy(uint64_t owner) {
  Clocks& all = clocks();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.by_owner.find(owner);
  if (found == all.by_owner.end()) return 0;
  const double seconds = found->second->take();
  if (found->second.use_count() == 1) all.by_owner.erase(found);
  return seconds;
}

}  // namespace dl_comm::torch_ops
