// A started call as torch sees it.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "call.h"

namespace dl_comm::c10d_backend {

// What the core and torch share of a call. The core's callback holds it, so that the tensors stay valid if torch drops
// the Work first. The core's threads free no tensors, which could need the GIL.
//
// Thread rule: any thread.
class CallState {
 public:
  // `stream`: on which a call on CUDA tensors runs.
  // A failure that ends the group is stored in `failure`.
  CallState(Call call, std::optional<c10::Stream> stream, std::shared_ptr<std::atomic<int>> failure);
  ~CallState();
  CallState(const CallState&) = delete;
  CallState& operator=(const CallState&) = delete;

  // Starts the call by `function` of the core, with `request` (a dl_comm_call_t or dl_comm_message_t). Throws the error
  // if nothing was started.
  template <typename Request, typename Function>
  static void start(const std::shared_ptr<CallState>& self, dl_comm_group_t* group, Request& request,
                    Function* function) {
    auto owner = std::make_unique<std::shared_ptr<CallState>>(self);
    request.context = owner.get();
    request.done = [](void* context, int code, const char* message) {
      const std::unique_ptr<std::shared_ptr<CallState>> owner(static_cast<std::shared_ptr<CallState>*>(context));
      CallState::end(*owner, code, message);
    };
    const int code = function(group, &request, &self->handle);
    if (code >= 0) {
      static_cast<void>(owner.release());  // `done` has it
      return;
    }
    const std::string message = dl_comm_last_error();
    end(self, code, message.c_str());
    throw_error(code, message);
  }

  // The call has ended; for the core, once. `self` is this object.
  static void end(const std::shared_ptr<CallState>& self, int code, const char* message);

  // Torch has dropped the Work. The outputs are still copied to where the caller wants them.
  void drop();

  // Also lets the core complete a call that nobody waits for.
  bool ended() const;

  // Whether the call reads or writes the memory of this tensor.
  bool uses(const at::Tensor& tensor) const;

  // Waits for the end; false after `seconds` (0: no limit).
  bool wait(double seconds);

  // For a call that has ended: makes its outputs usable on the current stream, and frees what only the call has used.
  // Throws the call's error.
  void finish();

  // The error of a call that has ended, or null.
  std::exception_ptr error();

  // Whether the GPU has carried out a call that has ended.
  bool is_carried_out() const;

  // Waits until it has.
  void synchronize();

  // The Future of the call: completed now if the call has ended, else on the pool.
  c10::intrusive_ptr<c10::ivalue::Future> future();

  // Completes the Future of a call that has ended. Runs its callbacks.
  void complete_future();

  // The rank that has sent the message of a receive that has ended.
  int source() const;

  // The core's handle, which this object frees. Set once, before anybody but the core has this object.
  dl_comm_work_t* handle = nullptr;
  // Ends the profiler's record of the call. Set as `handle`.
  std::function<void()> on_end;
  Call call;

 private:
  // As `finish`, on the stream of the call, for a thread that has no stream of its own.
  void finish_on_own_stream();
  // Finishes a call that has ended and whose Work is gone.
  void release();
  c10::IValue value() const;

  const std::optional<c10::Stream> stream_;
  const std::shared_ptr<std::atomic<int>> failure_;
  // Guards the fields that the core's thread changes.
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false;
  bool dropped_ = false;
  int code_ = 0;
  std::string message_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  // Guards what `finish` does once.
  std::mutex finish_mutex_;
  bool finished_ = false;
  std::exception_ptr error_;
  std::optional<c10::Event> event_;
};

// Thread rule: any thread.
class CallWork final : public ::c10d::Work {
 public:
  // `number`: as torch's sequence number of collectives; 0 for messages.
  CallWork(int rank, ::c10d::OpType type, uint64_t number, std::shared_ptr<CallState> state);
  ~CallWork() override;

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return number_; }

  const std::shared_ptr<CallState> state;

 private:
  const uint64_t number_;
};

// Several works as one.
//
// Thread rule: any thread.
class WorkList final : public ::c10d::Work {
 public:
  explicit WorkList(std::vector<c10::intrusive_ptr<::c10d::Work>> works);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  const std::vector<c10::intrusive_ptr<::c10d::Work>> works_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// A call that has ended with success before it was returned.
//
// Thread rule: any thread.
class EndedWork final : public ::c10d::Work {
 public:
  EndedWork(int rank, ::c10d::OpType type, std::vector<at::Tensor> outputs);

  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  const std::vector<at::Tensor> outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Whether this error of the core ends the group.
bool ends_group(int code);

// Seconds for the core; 0, the group's deadline, for the times that torch uses for none.
double to_seconds(std::chrono::milliseconds time);

}  // namespace dl_comm::c10d_backend
