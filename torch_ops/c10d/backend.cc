#include "backend.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "dl_comm/errors.h"
#include "shared_memory.h"

namespace dl_comm::c10d_backend {

Backend::Backend(int rank, std::vector<int> ranks, const std::string& name, Milliseconds timeout)
    : ::c10d::Backend(rank, static_cast<int>(ranks.size())),
      ranks_(std::move(ranks)),
      name_(name),
      process_(::getpid()),
      group_timeout_(timeout),
      timeout_(timeout) {
  dl_comm_group_options_t options{};
  options.size = sizeof options;
  options.timeout = to_seconds(timeout);
  dl_comm_group_t* made = nullptr;
  check(dl_comm_group_create_with(ranks_.data(), static_cast<int>(ranks_.size()), name_.c_str(), &options, &made));
  group_ = {made, [process = process_](dl_comm_group_t* group) {
              if (::getpid() == process) dl_comm_group_free(group);
            }};
  int own = -1;
  check(dl_comm_group_rank(made, &own));
  if (own != rank)
    throw_invalid(c10::str("rank ", rank, " of '", name_, "' is rank ", own,
                           " of the same ranks in dl_comm: torch and ", "dl_comm need the same numbers"));
}

Backend::~Backend() { shutdown(); }

void Backend::shutdown() {
  std::shared_ptr<dl_comm_group_t> ended;
  const std::lock_guard<std::mutex> lock(mutex_);
  ended.swap(group_);
}

void Backend::abort() {
  std::shared_ptr<dl_comm_group_t> aborted;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    aborted = group_;
  }
  if (aborted) check(dl_comm_group_abort(aborted.get(), "abort() of its process group"));
}

std::shared_ptr<dl_comm_group_t> Backend::group() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!group_) throw_error(DL_COMM_ERROR_STATE, "'" + name_ + "' was destroyed");
  return group_;
}

c10::intrusive_ptr<Backend::Options> Backend::getBackendOptions() {
  return c10::make_intrusive<Options>(getBackendName(), timeout_.load());
}

::c10d::ErrorType Backend::getError() {
  switch (failure_->load()) {
    case 0:
      return ::c10d::ErrorType::SUCCESS;
    case DL_COMM_ERROR_TIMEOUT:
      return ::c10d::ErrorType::TIMEOUT;
    case DL_COMM_ERROR_PEER_LOST:
      return ::c10d::ErrorType::REMOTE_ERROR;
    default:
      return ::c10d::ErrorType::COMM_ERROR;
  }
}

c10::intrusive_ptr<::c10d::Backend> Backend::split(const c10::intrusive_ptr<::c10d::Store>& /*store*/,
                                                   const std::vector<int>& ranks,
                                                   const c10::intrusive_ptr<Options>& options) {
  const auto mine = std::find(ranks.begin(), ranks.end(), getRank());
  if (mine == ranks.end()) return nullptr;
  const std::string name = options ? options->group_name : std::string();
  // torch's default stands for no choice.
  const bool has_timeout = options && options->timeout != kBackendDefaultTimeout;
  const std::lock_guard<std::mutex> lock(split_mutex_);
  if (auto last = split_.lock(); last && split_name_ == name && split_ranks_ == ranks) return last;
  std::vector<int> members;
  for (const int rank : ranks) members.push_back(ranks_.at(static_cast<std::size_t>(rank)));
  const c10::intrusive_ptr<::c10d::Backend> child = c10::make_intrusive<Backend>(
      static_cast<int>(mine - ranks.begin()), std::move(members), name.empty() ? name_ + ":split" : name,
      has_timeout ? options->timeout : timeout_.load());
  split_ = child;
  split_ranks_ = ranks;
  split_name_ = name;
  return child;
}

void Backend::startCoalescing() {
  const std::lock_guard<std::mutex> lock(mutex_);
  coalescing_ = std::this_thread::get_id();
  // Those of a block that has ended with an exception.
  coalesced_.clear();
}

WorkPtr Backend::endCoalescing() {
  const std::lock_guard<std::mutex> lock(mutex_);
  coalescing_ = {};
  return c10::make_intrusive<WorkList>(std::exchange(coalesced_, {}));
}

bool Backend::is_coalescing() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return coalescing_ == std::this_thread::get_id();
}

at::Tensor Backend::allocateTensor(long size, at::TensorOptions options) {
  return shared_tensor(static_cast<int64_t>(size), options);
}

double Backend::seconds(Milliseconds timeout) const {
  if (timeout.count() > 0) return to_seconds(timeout);
  // The core has the group's own deadline, and says so in messages.
  const auto current = timeout_.load();
  return current == group_timeout_ ? 0 : to_seconds(current);
}

void Backend::check_rank(int64_t rank) const {
  if (rank < 0 || rank >= getSize())
    throw_invalid(c10::str("rank ", rank, " is not in the process group, which has ", getSize(), " ranks"));
}

bool Backend::is_in_use(const at::Tensor& tensor) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(started_.begin(), started_.end(), [&tensor](const auto& weak) {
    const auto state = weak.lock();
    return state && !state->ended() && state->uses(tensor);
  });
}

WorkPtr Backend::checked(const char* title, Milliseconds timeout, c10::function_ref<WorkPtr()> start) {
  try {
    return start();
  } catch (const ::c10::DistBackendError&) {
    throw;  // of the core, which has told the other ranks
  } catch (const c10::ValueError&) {
    throw;  // as all argument errors: nothing has happened, and the script may make the right call
  } catch (const Error& error) {
    throw_invalid(std::string(error.message()));
  } catch (const std::exception& error) {
    Call call(DL_COMM_BARRIER, title, true);
    call.refuse(error.what());
    auto request = call.describe(seconds(timeout));
    // If all ranks have made the same mistake, this is a barrier. If not, the other ranks' calls fail with this name.
    dl_comm_run(group().get(), &request);
    throw;
  }
}

WorkPtr Backend::started(c10::intrusive_ptr<CallWork> work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (started_.size() >= sweep_at_) {
    started_.erase(std::remove_if(started_.begin(), started_.end(), [](const auto& state) { return state.expired(); }),
                   started_.end());
    sweep_at_ = 2 * started_.size() + 16;
  }
  started_.push_back(work->state);
  if (coalescing_ == std::this_thread::get_id()) coalesced_.push_back(work);
  return work;
}

void Backend::wait_for_started() {
  std::vector<std::weak_ptr<CallState>> all;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    all.swap(started_);
  }
  for (const auto& weak : all)
    if (const auto state = weak.lock()) state->synchronize();
}

WorkPtr Backend::launch(Call call, ::c10d::OpType type, bool is_async, Milliseconds timeout) {
  const uint64_t number = ++number_;
  const bool on_gpu = call.device().is_cuda();
  // In this mode torch's graphs keep the Work of every call.
  if (!is_async && !is_coalescing() && !::c10d::allow_inflight_collective_as_graph_input()) {
    RECORD_FUNCTION(call.title, c10::ArrayRef<const c10::IValue>{});
    auto request = call.describe(seconds(timeout));
    dl_comm_device_t device{};
    if (on_gpu) {
      device = core_device(current_stream(call.device()));
      request.device = &device;
    }
    const int code = dl_comm_run(group().get(), &request);
    if (ends_group(code)) *failure_ = code;
    check(code);
    if (call.finish) call.finish();
    return nullptr;
  }
  const auto group = this->group();
  std::optional<c10::Stream> stream;
  dl_comm_device_t device{};
  if (on_gpu) {
    stream = streams_.of(call.device());
    order(current_stream(call.device()), *stream);
    device = core_device(*stream);
  }
  auto state = std::make_shared<CallState>(std::move(call), stream, failure_);
  auto work = c10::make_intrusive<CallWork>(getRank(), type, number, state);
  auto request = state->call.describe(seconds(timeout));
  if (on_gpu) request.device = &device;
  request.flags |= DL_COMM_ON_WAIT;
  CallState::start(state, group.get(), request, dl_comm_start);
  return started(std::move(work));
}

}  // namespace dl_comm::c10d_backend
