// See stream.h.
#include "stream.h"

#include <chrono>
#include <thread>
#include <utility>

#include "abort.h"
#include "faults.h"

namespace fake {
namespace {

bool in_one_queue() {
  static const bool one = setting("FAKE_CUDA_ONE_QUEUE", 0) != 0;
  return one;
}

}  // namespace

void Mark::pass() {
  const std::lock_guard lock(mutex_);
  passed_ = true;
  changed_.notify_all();
}

void Mark::wait() {
  std::unique_lock lock(mutex_);
  // After a sticky error no operation passes the mark.
  while (!passed_ && fault() == CUDA_SUCCESS) changed_.wait_for(lock, std::chrono::milliseconds(1));
}

bool Mark::passed() {
  const std::lock_guard lock(mutex_);
  return passed_;
}

CUresult Stream::push_made(const Graph::Maker& maker) {
  if (const auto graph = this->graph()) {
    graph->add(this, maker);
    return CUDA_SUCCESS;
  }
  return push(maker());
}

CUresult Stream::push(std::function<void()> operation) {
  const std::lock_guard lock(mutex_);
  if (graph_ != nullptr) {
    graph_->add(this, [operation = std::move(operation)] { return operation; });
    return CUDA_SUCCESS;
  }
  if (!std::exchange(started_, true)) std::thread([self = shared_from_this()] { self->work(); }).detach();
  queue_.push_back({std::move(operation), context->next++});
  ++pushed_;
  changed_.notify_all();
  return CUDA_SUCCESS;
}

CUresult Stream::finish() {
  std::unique_lock lock(mutex_);
  if (graph_ != nullptr) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  changed_.wait(lock, [this, last = pushed_] { return finished_ >= last; });
  return fault();
}

CUresult Stream::query() {
  const std::lock_guard lock(mutex_);
  if (graph_ != nullptr) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  return finished_ == pushed_ ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

void Stream::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

std::shared_ptr<Graph> Stream::graph() {
  const std::lock_guard lock(mutex_);
  return graph_;
}

std::shared_ptr<Graph> Stream::set_graph(std::shared_ptr<Graph> graph) {
  const std::lock_guard lock(mutex_);
  return std::exchange(graph_, std::move(graph));
}

void Stream::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return closed_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Operation operation = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    if (in_one_queue()) {
      for (int round = 0; context->running != operation.number; backoff(round)) continue;
    }
    random_delay();
    run_or_fault(operation.run);
    operation.run = nullptr;  // Releases captured memory before anyone sees that the operation has run.
    ++context->running;
    lock.lock();
    ++finished_;
    changed_.notify_all();
  }
}

}  // namespace fake
