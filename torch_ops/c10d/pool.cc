#include "pool.h"

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

namespace dl_comm::c10d_backend {
namespace {

constexpr std::chrono::seconds kIdleTime{5};

class Pool {
 public:
  void run(std::function<void()> task) {
    const std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    if (tasks_.size() <= num_idle_) {
      changed_.notify_one();
      return;
    }
    std::thread([this] { serve(); }).detach();
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      while (!tasks_.empty()) {
        auto task = std::move(tasks_.front());
        tasks_.pop_front();
        lock.unlock();
        task();
        task = nullptr;
        lock.lock();
      }
      ++num_idle_;
      changed_.wait_for(lock, kIdleTime, [this] { return !tasks_.empty(); });
      --num_idle_;
      if (tasks_.empty()) return;
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::size_t num_idle_ = 0;
};

}  // namespace

void run_on_pool(std::function<void()> task) {
  // Never destroyed: its threads may run while the process exits.
  static Pool* const pool = new Pool;
  pool->run(std::move(task));
}

}  // namespace dl_comm::c10d_backend
