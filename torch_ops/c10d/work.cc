#include "work.h"

#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "device.h"
#include "interpreter.h"
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

// The CUDA devices of the tensors, which a Future must know.
std::vector<c10::Device> devices_of(const std::vector<at::Tensor>& tensors) {
  std::vector<c10::Device> devices;
  for (const auto& tensor : tensors) {
    const auto device = tensor.device();
    if (device.is_cuda() && std::find(devices.begin(), devices.end(), device) == devices.end())
      devices.push_back(device);
  }
  return devices;
}

// Waits until the call has ended, with success or not.
void wait_for_end(::c10d::Work& work) {
  try {
    work.wait();
  } catch (const std::exception&) {
    // The Future gets this error.
  }
}

}  // namespace

double to_seconds(std::chrono::milliseconds time) {
  return time.count() > 0 ? static_cast<double>(time.count()) / 1e3 : 0;
}

bool ends_group(int code) {
  return code == DL_COMM_ERROR_TIMEOUT || code == DL_COMM_ERROR_PEER_LOST || code == DL_COMM_ERROR_MPI;
}

CallState::CallState(Call call, std::optional<c10::Stream> stream, std::shared_ptr<std::atomic<int>> failure)
    : call(std::move(call)), stream_(stream), failure_(std::move(failure)) {}

CallState::~CallState() { dl_comm_work_free(handle); }

void CallState::end(const std::shared_ptr<CallState>& self, int code, const char* message) {
  if (ends_group(code)) *self->failure_ = code;
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
  if (has_future)
    run_on_pool([self] { self->complete_future(); });
  else if (dropped)
    run_on_pool([self] { self->release(); });
}

void CallState::drop() {
  ended();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    dropped_ = true;
    if (!ended_ || future_) return;
  }
  release();
}

void CallState::release() {
  finish_on_own_stream();
  // Freed here, since the core's thread may hold this object last.
  std::vector<at::Tensor> outputs;
  std::vector<std::vector<at::Tensor>> lists;
  const std::lock_guard<std::mutex> lock(finish_mutex_);
  outputs.swap(call.outputs);
  lists.swap(call.output_lists);
}

bool CallState::ended() const {
  int has_ended = 0;
  dl_comm_test(handle, &has_ended);  // DL_COMM_ON_WAIT; the error is that of `code_`
  const std::lock_guard<std::mutex> lock(mutex_);
  return ended_;
}

bool CallState::uses(const at::Tensor& tensor) const {
  return std::any_of(call.buffers.begin(), call.buffers.end(), [&tensor](const dl_comm_buffer_t& buffer) {
    return buffer.src == tensor.const_data_ptr() || buffer.dst == tensor.const_data_ptr();
  });
}

bool CallState::wait(double seconds) {
  // The core's wait handles signals, and lets the core know that this thread waits.
  const int code = dl_comm_wait(handle, seconds);
  const std::string message = code < 0 ? dl_comm_last_error() : "";
  int has_ended = 0;
  dl_comm_test(handle, &has_ended);
  std::unique_lock<std::mutex> lock(mutex_);
  if (has_ended == 0 && !ended_) {
    if (seconds > 0 && code == DL_COMM_ERROR_TIMEOUT) return false;
    // A forked child, in which the call cannot end.
    if (code < 0) throw_error(code, message);
  }
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
      if (event_) event_->block(current_stream(call.device()));
      if (call.finish) call.finish();
      // What has been done on this stream belongs to the call.
      if (event_ && call.finish) event_->record(current_stream(call.device()));
    } catch (...) {
      error_ = std::current_exception();
    }
    if (stream_) record_use(call.tensors, *stream_);
    if (stream_ && call.finish) {
      record_use(call.tensors, current_stream(call.device()));
      record_use(call.outputs, current_stream(call.device()));
    }
    used.swap(call.tensors);
    finishing.swap(call.finish);
  } else if (event_ && !error_) {
    event_->block(current_stream(call.device()));
  }
  if (!error_ && stream_) {
    // A call that has ended may have been lost on the GPU since.
    int has_ended = 0;
    const int code = dl_comm_test(handle, &has_ended);
    try {
      if (code < 0) throw_error(code, dl_comm_last_error());
    } catch (...) {
      error_ = std::current_exception();
    }
  }
  if (error_) std::rethrow_exception(error_);
}

void CallState::finish_on_own_stream() {
  c10::OptionalStreamGuard guard;
  if (stream_) guard.reset_stream(*stream_);
  try {
    finish();
  } catch (const std::exception&) {
    // `error_` keeps it for those who ask. A dropped call has nobody who asks; its group has recorded the error.
  }
}

std::exception_ptr CallState::error() {
  finish_on_own_stream();
  const std::lock_guard<std::mutex> lock(finish_mutex_);
  return error_;
}

bool CallState::is_carried_out() const { return !event_ || event_->query(); }

void CallState::synchronize() {
  wait(0);
  if (event_) event_->synchronize();
}

c10::intrusive_ptr<c10::ivalue::Future> CallState::future() {
  ended();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (future_) return future_;
    const auto type = call.output_lists.empty() ? tensors_type() : c10::ListType::create(tensors_type());
    const std::vector<c10::Device> devices(stream_ ? 1 : 0, call.device());
    future_ = c10::make_intrusive<c10::ivalue::Future>(type, devices);
    if (!ended_) return future_;
  }
  complete_future();
  return future_;
}

void CallState::complete_future() {
  c10::OptionalStreamGuard guard;
  if (stream_) guard.reset_stream(*stream_);
  try {
    finish();
    future_->markCompleted(value());
  } catch (...) {
    // Also the exception of a callback, after which the Future is complete.
    future_->setErrorIfNeeded(std::current_exception());
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

c10::intrusive_ptr<c10::ivalue::Future> CallWork::getFuture() {
  // A callback may start calls. The callbacks of a Future that is complete run in the thread that adds them, and so in
  // the same place among this rank's calls on all ranks. Otherwise that would depend on time.
  if (const WithoutGil without_gil; without_gil.had_gil()) state->wait(0);
  return state->future();
}

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
  bool had_gil = false;
  if (const WithoutGil without_gil; (had_gil = without_gil.had_gil())) {
    for (const auto& work : works_) wait_for_end(*work);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (future_) return future_;
  future_ = c10::make_intrusive<c10::ivalue::Future>(tensors_type(), devices_of(results_of(works_)));
  const auto complete = [future = future_, works = works_] {
    try {
      // Orders the current stream after the calls.
      for (const auto& work : works) work->wait();
      future->markCompleted(c10::IValue(results_of(works)));
    } catch (...) {
      future->setErrorIfNeeded(std::current_exception());
    }
  };
  if (had_gil)
    complete();
  else
    run_on_pool(complete);
  return future_;
}

EndedWork::EndedWork(int rank, ::c10d::OpType type, std::vector<at::Tensor> outputs)
    : Work(rank, type), outputs_(std::move(outputs)) {
  finish();
}

c10::intrusive_ptr<c10::ivalue::Future> EndedWork::getFuture() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!future_) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(tensors_type(), devices_of(outputs_));
    future_->markCompleted(c10::IValue(outputs_));
  }
  return future_;
}

}  // namespace dl_comm::c10d_backend
