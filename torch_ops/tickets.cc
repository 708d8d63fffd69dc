#include "tickets.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <iterator>
#include <unordered_map>
#include <utility>

#include "failure.h"

namespace dl_comm::torch_ops {
namespace {

class TicketCompletion final : public Completion {
 public:
  explicit TicketCompletion(std::shared_ptr<Ticket> ticket) : ticket_(std::move(ticket)) {}

  void done(int32_t code, rust::Str message, std::shared_ptr<Results> results) const noexcept override {
    ticket_->finish(code, std::string(message), std::move(results));
  }

 private:
  std::shared_ptr<Ticket> ticket_;
};

struct Registry {
  std::mutex mutex;
  int64_t last = 0;
  std::unordered_map<int64_t, std::shared_ptr<Ticket>> open;
  std::vector<std::shared_ptr<Ticket>> forgotten;
};

// Never destroyed: calls may still be under way while the process exits.
Registry& registry() {
  static Registry* const instance = new Registry;
  return *instance;
}

// Takes the forgotten tickets whose calls have ended, for the caller to free after it has unlocked the registry.
std::vector<std::shared_ptr<Ticket>> ended(Registry& all) {
  const auto first = std::partition(all.forgotten.begin(), all.forgotten.end(),
                                    [](const std::shared_ptr<Ticket>& ticket) { return !ticket->finished(); });
  std::vector<std::shared_ptr<Ticket>> result(std::make_move_iterator(first),
                                              std::make_move_iterator(all.forgotten.end()));
  all.forgotten.erase(first, all.forgotten.end());
  return result;
}

std::shared_ptr<Ticket> take(Registry& all, int64_t number) {
  const auto found = all.open.find(number);
  if (found == all.open.end()) throw failure(-1, "no call with number ", number, " is under way");
  auto ticket = std::move(found->second);
  all.open.erase(found);
  return ticket;
}

}  // namespace

std::size_t TensorResults::kind() const noexcept {
  static const char mark = 0;  // one address for this library
  return reinterpret_cast<std::size_t>(&mark);
}

void TensorResults::settle(double own, double here) const noexcept {
  own_share = own;
  share = here;
}

std::shared_ptr<Results> TensorResults::blank(rust::Vec<std::size_t>& addresses) const noexcept {
  try {
    std::vector<::torch::stable::Tensor> zeros;
    for (const auto& tensor : tensors) {
      zeros.push_back(::torch::stable::empty_like(tensor));
      ::torch::stable::zero_(zeros.back());
      addresses.push_back(reinterpret_cast<std::size_t>(zeros.back().mutable_data_ptr()));
    }
    // Who uses them does so on another stream than this thread's, on which they were made.
    if (place.device >= 0) order(place.device, now(place).stream, place.stream);
    return std::make_shared<TensorResults>(std::move(zeros), place);
  } catch (const std::exception&) {
    return nullptr;
  }
}

void Ticket::finish(int32_t code, std::string message, std::shared_ptr<Results> results) noexcept {
  // Notified under the lock: the waiter may drop the ticket as soon as it can see the flag.
  if (clock_) clock_->end();
  const std::lock_guard<std::mutex> lock(mutex_);
  clock_.reset();
  code_ = code;
  message_ = std::move(message);
  results_ = std::move(results);
  finished_ = true;
  ended_.notify_all();
}

bool Ticket::finished() const noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  return finished_;
}

Outcome Ticket::wait() {
  std::vector<::torch::stable::Tensor> own;
  std::shared_ptr<Results> results;
  {
    const auto since = std::chrono::steady_clock::now();
    std::unique_lock<std::mutex> lock(mutex_);
    const auto ended = [this] { return finished_; };
    constexpr std::chrono::milliseconds kLook{100};
    if (!ended_.wait_for(lock, kLook, ended)) {
      const auto long_wait = begin_wait();
      do {
        // Handlers of signals run here, which may take time.
        lock.unlock();
        long_wait->look();
        lock.lock();
      } while (!ended_.wait_for(lock, kLook, ended));
    }
    own.swap(tensors_);
    results.swap(results_);
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - since;
    if (counted_on_ >= 0) add_waited(counted_on_, waited.count());
  }
  if (code_ != 0) throw failure(code_, message_);
  // The stream of the call sees the result; the one that is current here may be another.
  if (place_.device >= 0) {
    try {
      order(place_.device, place_.stream, now(place_).stream);
    } catch (const rust::Error& error) {
      throw failure(-7, error.what());
    }
  }
  if (!results) return {};
  auto& have = static_cast<TensorResults&>(*results);  // by `kind`, no other library's results come here
  return {std::move(have.tensors), have.own_share, have.share};
}

std::unique_ptr<Completion> completion_of(std::shared_ptr<Ticket> ticket) {
  return std::make_unique<TicketCompletion>(std::move(ticket));
}

int64_t enroll(std::shared_ptr<Ticket> ticket) {
  Registry& all = registry();
  std::vector<std::shared_ptr<Ticket>> garbage;
  const std::lock_guard<std::mutex> lock(all.mutex);
  garbage = ended(all);
  all.open.emplace(++all.last, std::move(ticket));
  return all.last;
}

std::shared_ptr<Ticket> withdraw(int64_t number) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return take(all, number);
}

void forget(int64_t number) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.forgotten.push_back(take(all, number));
}

}  // namespace dl_comm::torch_ops
