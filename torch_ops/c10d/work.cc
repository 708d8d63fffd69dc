#include "work.h"

#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include <utility>

#include "device.h"
#include "pool.h"

namespace dl_comm::c10d_backend {
namespace {

using Works = std::vector<c10::intrusive_ptr<::c10d::Work>>;

c10::TypePtr tensors_type() { return c10::ListType::create(c10::TensorType::get()); }

std::vector<at::Tensor> results_of(const Works& works) {
  std::vector<at::Tensor> all;
  for (const auto& work : works) {
    const auto some = work->result();
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

}  // namespace

double to_seconds(std::chrono::milliseconds time) {
  return time.count() > 0 ? static_cast<double>(time.count()) / 1e3 : 0;
}

CallState::CallState(Call call, uint64_t number, std::shared_ptr<FutureQueue> queue, std::optional<c10::Stream> stream)
    : call(std::move(call)),
      number_(number),
      queue_(std::move(queue)),
      nested_(queue_ != nullptr && FutureQueue::in_callback()),
      stream_(stream) {
  if (nested_) queue_->begin_nested();
}

CallState::~CallState() { dl_comm_work_free(handle); }

void CallState::end(const std::shared_ptr<CallState>& self, int code, const char* message) {
  bool has_future = false;
  bool dropped = false;
  std::function<void()> at_end;
  {
    const std::lock_guard<std::mutex> lock(self->mutex_);
    self->code_ = code;
    self->message_ = message != nullptr ? message : "";
    if (self->stream_ && code == 0) {
      try {
        self->event_.emplace(self->stream_->device_type());
        self->event_->record(*self->stream_);
      } catch (const std::exception& error) {
        self->code_ = DL_COMM_ERROR_SYSTEM;
        self->message_ = error.what();
      }
    }
    self->ended_ = true;
    has_future = self->future_ != nullptr;
    dropped = self->dropped_;
    at_end = std::move(self->on_end);
    self->changed_.notify_all();
  }
  if (at_end) at_end();
  if (self->nested_) self->queue_->end_nested();
  if (has_future && self->queue_ && !self->nested_)
    self->queue_->advance();
  else if (has_future)
    run_on_pool([self] { FutureQueue::complete(*self); });
  else if (dropped)
    run_on_pool([self] { self->finish_on_own_stream(); });
}

void CallState::drop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    dropped_ = true;
    if (!ended_ || future_) return;
  }
  finish_on_own_stream();
}

bool CallState::ended() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return ended_;
}

bool CallState::wait(double seconds) {
  // The core's wait handles signals, and lets the core know that this thread waits.
  const int code = dl_comm_wait(handle, seconds);
  std::unique_lock<std::mutex> lock(mutex_);
  if (seconds > 0 && code == DL_COMM_ERROR_TIMEOUT && !ended_) return false;
  changed_.wait(lock, [this] { return ended_; });
  return true;
}

void CallState::finish() {
  // Freed after the lock: that may need the GIL, whose owner may wait for the lock.
  std::vector<at::Tensor> used;
  std::function<void()> finishing;
  const std::lock_guard<std::mutex> lock(finish_mutex_);
  if (!finished_) {
    finished_ = true;
    try {
      if (code_ != 0) throw_error(code_, message_);
      dl_comm_status_t status{};
      if (expected_bytes != 0) check(dl_comm_work_status(handle, &status));
      if (status.bytes != expected_bytes)
        throw_error(DL_COMM_ERROR_MISMATCH, c10::str("rank ", status.source, " has sent ", status.bytes,
                                                     " bytes to a receive of ", expected_bytes, " bytes"));
      if (event_) event_->block(current_stream(call.device()));
      if (call.finish) call.finish();
      // What has been done on this stream belongs to the call.
      if (event_ && call.finish) event_->record(current_stream(call.device()));
    } catch (...) {
      error_ = std::current_exception();
    }
    if (stream_) record_use(call.tensors, *stream_);
    used.swap(call.tensors);
    finishing.swap(call.finish);
  } else if (event_ && !error_) {
    event_->block(current_stream(call.device()));
  }
  if (error_) std::rethrow_exception(error_);
}

void CallState::finish_on_own_stream() {
  c10::OptionalStreamGuard guard;
  if (stream_) guard.reset_stream(*stream_);
  try {
    finish();
  } catch (const std::exception&) {
    // `error_` keeps it for those who ask. Nobody asks for that of a dropped call, whose group has recorded it.
  }
}

std::exception_ptr CallState::error() {
  finish_on_own_stream();
  const std::lock_guard<std::mutex> lock(finish_mutex_);
  return error_;
}

bool CallState::is_carried_out() const { return !event_ || event_->query(); }

c10::intrusive_ptr<c10::ivalue::Future> CallState::future(const std::shared_ptr<CallState>& self) {
  bool ended = false;
  {
    const std::lock_guard<std::mutex> lock(self->mutex_);
    if (self->future_) return self->future_;
    const auto type = self->call.output_lists.empty() ? tensors_type() : c10::ListType::create(tensors_type());
    const std::vector<c10::Device> devices(self->stream_ ? 1 : 0, self->call.device());
    self->future_ = c10::make_intrusive<c10::ivalue::Future>(type, devices);
    ended = self->ended_;
  }
  if (self->queue_ && !self->nested_) {
    self->queue_->add(self->number_, self);
    // The call may have ended before it was in the queue.
    self->queue_->advance();
  } else if (ended) {
    FutureQueue::complete(*self);
  }
  return self->future_;
}

void CallState::complete_future() {
  c10::OptionalStreamGuard guard;
  if (stream_) guard.reset_stream(*stream_);
  try {
    finish();
    future_->markCompleted(value());
  } catch (const std::exception&) {
    future_->setError(std::current_exception());
  }
}

c10::IValue CallState::value() const {
  return call.output_lists.empty() ? c10::IValue(call.outputs) : c10::IValue(call.output_lists);
}

int CallState::source() const {
  dl_comm_status_t status{};
  check(dl_comm_work_status(handle, &status));
  return status.source;
}

CallWork::CallWork(int rank, ::c10d::OpType type, uint64_t number, std::shared_ptr<CallState> state)
    : Work(rank, type, state->call.title, state->call.tensors), state(std::move(state)), number_(number) {
  this->state->on_end = std::move(recordFunctionEndCallback_);
}

CallWork::~CallWork() { state->drop(); }

bool CallWork::isCompleted() {
  if (!state->ended()) return false;
  // Scripts that poll use the outputs without a wait.
  return state->error() != nullptr || state->is_carried_out();
}

bool CallWork::isSuccess() const { return state->ended() && state->error() == nullptr; }

std::exception_ptr CallWork::exception() const { return state->ended() ? state->error() : nullptr; }

int CallWork::sourceRank() const { return state->source(); }

std::vector<at::Tensor> CallWork::result() { return state->call.outputs; }

void CallWork::synchronize() { wait(kNoTimeout); }

bool CallWork::wait(std::chrono::milliseconds timeout) {
  if (!state->wait(to_seconds(timeout)))
    throw_error(DL_COMM_ERROR_TIMEOUT, c10::str(function_name(state->call.title), " has not ended within ",
                                                to_seconds(timeout), " s; it goes on"));
  state->finish();
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> CallWork::getFuture() { return CallState::future(state); }

WorkList::WorkList(Works works) : Work(-1, ::c10d::OpType::COALESCED), works_(std::move(works)) {}

bool WorkList::isCompleted() {
  for (const auto& work : works_)
    if (!work->isCompleted()) return false;
  return true;
}

bool WorkList::isSuccess() const {
  for (const auto& work : works_)
    if (!work->isSuccess()) return false;
  return true;
}

std::exception_ptr WorkList::exception() const {
  for (const auto& work : works_)
    if (auto error = work->exception()) return error;
  return nullptr;
}

std::vector<at::Tensor> WorkList::result() { return results_of(works_); }

void WorkList::synchronize() { wait(kNoTimeout); }

bool WorkList::wait(std::chrono::milliseconds timeout) {
  for (const auto& work : works_) work->wait(timeout);
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> WorkList::getFuture() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (future_) return future_;
  future_ = c10::make_intrusive<c10::ivalue::Future>(tensors_type());
  run_on_pool([future = future_, works = works_] {
    try {
      for (const auto& work : works) work->wait();
      future->markCompleted(c10::IValue(results_of(works)));
    } catch (const std::exception&) {
      future->setError(std::current_exception());
    }
  });
  return future_;
}

EndedWork::EndedWork(int rank, ::c10d::OpType type, std::vector<at::Tensor> outputs)
    : Work(rank, type), outputs_(std::move(outputs)) {
  finish();
}

c10::intrusive_ptr<c10::ivalue::Future> EndedWork::getFuture() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!future_) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(tensors_type());
    future_->markCompleted(c10::IValue(outputs_));
  }
  return future_;
}

}  // namespace dl_comm::c10d_backend
