#include "pool.h"

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace dl_comm::c10d_backend {
namespace {

constexpr std::chrono::seconds kIdleTime{5};
constexpr std::chrono::seconds kCloseTime{1};

class Pool {
 public:
  void run(std::function<void()> task) {
    std::unique_lock<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    if (closed_) return;
    if (tasks_.size() <= num_idle_) {
      changed_.notify_one();
      return;
    }
    try {
      std::thread([this] { serve(); }).detach();
      ++num_threads_;
    } catch (const std::system_error&) {
      // The threads that run already take the task, or this one does.
      if (num_threads_ > 0) return;
      auto rest = std::move(tasks_);
      lock.unlock();
      for (auto& each : rest) each();
    }
  }

  void close() {
    std::unique_lock<std::mutex> lock(mutex_);
    closed_ = true;
    changed_.wait_for(lock, kCloseTime, [this] { return num_running_ == 0; });
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      while (!tasks_.empty() && !closed_) {
        auto task = std::move(tasks_.front());
        tasks_.pop_front();
        ++num_running_;
        lock.unlock();
        task();
        task = nullptr;
        lock.lock();
        --num_running_;
        if (closed_) changed_.notify_all();
      }
      ++num_idle_;
      changed_.wait_for(lock, kIdleTime, [this] { return !tasks_.empty() && !closed_; });
      --num_idle_;
      if (tasks_.empty() || closed_) {
        --num_threads_;
        return;
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::size_t num_idle_ = 0;
  std::size_t num_running_ = 0;
  std::size_t num_threads_ = 0;
  bool closed_ = false;
};

Pool& pool() {
  // Never destroyed: its threads may run while the process exits.
  static Pool* const pool = new Pool;
  return *pool;
}

}  // namespace

void run_on_pool(std::function<void()> task) { pool().run(std::move(task)); }

void close_pool() { pool().close(); }

}  // namespace dl_comm::c10d_backend
