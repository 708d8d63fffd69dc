#include "work.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <iterator>
#include <unordered_map>
#include <utility>

#include "dl_comm/errors.h"

namespace dl_comm::torch_ops {
namespace {

class WorkCompletion final : public Completion {
 public:
  explicit WorkCompletion(std::shared_ptr<Work> work) : work_(std::move(work)) {}

  void done(int32_t code, rust::Str message, std::shared_ptr<ResultBuffer> results) const noexcept override {
    work_->finish(code, std::string(message), std::move(results));
  }

  void received(int32_t source, int32_t tag, std::size_t bytes) const noexcept override {
    work_->receive({source, tag, bytes});
  }

 private:
  std::shared_ptr<Work> work_;
};

struct Registry {
  std::mutex mutex;
  int64_t last = 0;
  std::unordered_map<int64_t, std::shared_ptr<Work>> open;
  std::vector<std::shared_ptr<Work>> detached;
};

// Never destroyed: calls may still be in flight while the process exits.
Registry& registry() {
  static Registry* const instance = new Registry;
  return *instance;
}

// Removes the detached works whose calls have completed. The caller frees them after it unlocks the registry.
std::vector<std::shared_ptr<Work>> take_finished(Registry& all) {
  const auto first = std::partition(all.detached.begin(), all.detached.end(),
                                    [](const std::shared_ptr<Work>& work) { return !work->finished(); });
  std::vector<std::shared_ptr<Work>> result(std::make_move_iterator(first),
                                            std::make_move_iterator(all.detached.end()));
  all.detached.erase(first, all.detached.end());
  return result;
}

auto find(Registry& all, int64_t number) {
  const auto found = all.open.find(number);
  if (found == all.open.end()) throw Error(DL_COMM_ERROR_INVALID, "no call with number ", number, " is in flight");
  return found;
}

std::shared_ptr<Work> take(Registry& all, int64_t number) {
  const auto found = find(all, number);
  auto work = std::move(found->second);
  all.open.erase(found);
  return work;
}

}  // namespace

void TensorResults::set_weights(double own, double here) const noexcept {
  own_share = own;
  share = here;
}

std::shared_ptr<ResultBuffer> TensorResults::zeros_like(rust::Vec<std::size_t>& addresses) const noexcept {
  try {
    std::vector<::torch::stable::Tensor> zeros;
    for (const auto& tensor : tensors) {
      zeros.push_back(::torch::stable::empty_like(tensor));
      ::torch::stable::zero_(zeros.back());
      addresses.push_back(reinterpret_cast<std::size_t>(zeros.back().mutable_data_ptr()));
    }
    // This thread's stream creates the zeros, the call's stream uses them.
    if (device_stream.device >= 0)
      order(device_stream.device, with_current_stream(device_stream).stream, device_stream.stream);
    return std::make_shared<TensorResults>(std::move(zeros), device_stream);
  } catch (const std::exception&) {
    return nullptr;
  }
}

void Work::finish(int32_t code, std::string message, std::shared_ptr<ResultBuffer> results) noexcept {
  // Notify under the lock: the waiter may free this object as soon as it sees the flag.
  if (timer_) timer_->end();
  const std::lock_guard<std::mutex> lock(mutex_);
  timer_.reset();
  code_ = code;
  message_ = std::move(message);
  results_ = std::move(results);
  finished_ = true;
  ended_.notify_all();
}

bool Work::finished() const noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  return finished_;
}

void Work::receive(Status status) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  status_ = status;
}

Status Work::status() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return status_;
}

bool Work::wait_for(double seconds) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kPollInterval{100};
  constexpr double kLongest = 1e9;  // longer waits would overflow the clock
  const auto limit = std::chrono::duration<double>(seconds > 0 ? std::min(seconds, kLongest) : kLongest);
  const auto until = Clock::now() + std::chrono::duration_cast<Clock::duration>(limit);
  const auto ended = [this] { return finished_; };
  const auto next_poll = [until, kPollInterval] { return std::min(until, Clock::now() + kPollInterval); };
  std::unique_lock<std::mutex> lock(mutex_);
  if (ended_.wait_until(lock, next_poll(), ended)) return true;
  const auto long_wait = begin_wait();
  while (Clock::now() < until) {
    // Runs Python signal handlers, which may take long.
    lock.unlock();
    long_wait->look();
    lock.lock();
    if (ended_.wait_until(lock, next_poll(), ended)) return true;
  }
  return false;
}

Outcome Work::wait() {
  std::vector<::torch::stable::Tensor> own;
  std::shared_ptr<ResultBuffer> results;
  const auto since = std::chrono::steady_clock::now();
  wait_for(0);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    own.swap(tensors_);
    results.swap(results_);
  }
  const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - since;
  if (wait_time_team_ >= 0) add_waited(wait_time_team_, waited.count());
  if (code_ != 0) throw Error(code_, message_);
  if (device_stream_.device >= 0) {
    rust::String lost;
    if (const int32_t code = lost_call(lost); code != 0) throw Error(code, std::string(lost));
  }
  // The call's stream is ordered after the result; the current stream may be another one.
  if (device_stream_.device >= 0) {
    try {
      order(device_stream_.device, device_stream_.stream, with_current_stream(device_stream_).stream);
    } catch (const rust::Error& error) {
      throw Error(DL_COMM_ERROR_SYSTEM, error.what());
    }
  }
  if (!results) return {};
  auto& produced = static_cast<TensorResults&>(*results);  // `owner_type` excludes other libraries' results
  return {std::move(produced.tensors), produced.own_share, produced.share};
}

std::unique_ptr<Completion> completion_of(std::shared_ptr<Work> work) {
  return std::make_unique<WorkCompletion>(std::move(work));
}

int64_t register_work(std::shared_ptr<Work> work) {
  Registry& all = registry();
  std::vector<std::shared_ptr<Work>> garbage;
  const std::lock_guard<std::mutex> lock(all.mutex);
  garbage = take_finished(all);
  all.open.emplace(++all.last, std::move(work));
  return all.last;
}

std::shared_ptr<Work> find_work(int64_t number) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return find(all, number)->second;
}

std::shared_ptr<Work> take_work(int64_t number) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return take(all, number);
}

void detach_work(int64_t number) {
  Registry& all = registry();
  std::vector<std::shared_ptr<Work>> garbage;
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.detached.push_back(take(all, number));
  garbage = take_finished(all);
}

}  // namespace dl_comm::torch_ops
