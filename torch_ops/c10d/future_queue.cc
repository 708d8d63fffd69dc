#include "future_queue.h"

#include <thread>
#include <utility>

#include "pool.h"
#include "work.h"

namespace dl_comm::c10d_backend {
namespace {

constexpr std::chrono::seconds kGiveWayTime{1};

thread_local bool runs_callbacks = false;

}  // namespace

bool FutureQueue::in_callback() { return runs_callbacks; }

void FutureQueue::complete(CallState& state) {
  const bool outer = std::exchange(runs_callbacks, true);
  state.complete_future();
  runs_callbacks = outer;
}

void FutureQueue::add(uint64_t number, std::shared_ptr<CallState> state) {
  const std::lock_guard<std::mutex> lock(mutex_);
  queue_.emplace(number, std::move(state));
}

std::shared_ptr<CallState> FutureQueue::next(bool any) {
  for (auto entry = queue_.begin(); entry != queue_.end(); ++entry) {
    if (entry->second->ended()) {
      auto state = std::move(entry->second);
      queue_.erase(entry);
      return state;
    }
    if (!any) break;
  }
  return nullptr;
}

void FutureQueue::advance() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (running_ || queue_.empty() || !queue_.begin()->second->ended()) {
      if (!queue_.empty()) give_way_later();
      return;
    }
    running_ = true;
  }
  run_on_pool([self = shared_from_this()] { self->run(); });
}

void FutureQueue::run() {
  for (;;) {
    std::shared_ptr<CallState> state;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      state = next(false);
      if (!state) {
        running_ = false;
        return;
      }
    }
    complete(*state);
    const std::lock_guard<std::mutex> lock(mutex_);
    ++num_completed_;
  }
}

void FutureQueue::give_way_later() {
  if (std::exchange(will_give_way_, true)) return;
  std::thread([self = shared_from_this(), before = num_completed_] {
    std::this_thread::sleep_for(kGiveWayTime);
    {
      const std::lock_guard<std::mutex> lock(self->mutex_);
      self->will_give_way_ = false;
      if (self->queue_.empty()) return;
      if (self->num_completed_ != before || self->num_nested_ > 0) return self->give_way_later();
    }
    run_on_pool([self] { self->give_way(); });
  }).detach();
}

void FutureQueue::give_way() {
  std::shared_ptr<CallState> state;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    state = next(true);
    if (!queue_.empty()) give_way_later();
    if (state) ++num_completed_;
  }
  if (state) complete(*state);
}

void FutureQueue::begin_nested() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++num_nested_;
}

void FutureQueue::end_nested() {
  const std::lock_guard<std::mutex> lock(mutex_);
  --num_nested_;
}

}  // namespace dl_comm::c10d_backend
