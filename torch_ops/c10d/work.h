// A started call as torch sees it.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

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
#include "future_queue.h"

namespace dl_comm::c10d_backend {

// What the core and torch share of a call. The core's callback holds it, so that the tensors stay valid if torch drops
// the Work first. The core's threads free no tensors, which could need the GIL.
//
// Thread rule: any thread.
class CallState {
 public:
  // `queue` completes the Futures of the group; null for messages, whose order is free. `number` is the call's position
  // there. `stream`: on which a call on CUDA tensors runs.
  CallState(Call call, uint64_t number, std::shared_ptr<FutureQueue> queue, std::optional<c10::Stream> stream);
  ~CallState();
  CallState(const CallState&) = delete;
  CallState& operator=(const CallState&) = delete;

  // The call has ended; for the core, once. `self` is this object.
  static void end(const std::shared_ptr<CallState>& self, int code, const char* message);

  // Torch has dropped the Work, and nobody asks this object any more.
  void drop();

  bool ended() const;

  // Waits for the end; false after `seconds` (0: no limit).
  bool wait(double seconds);

  // For a call that has ended: makes its outputs usable on the current stream, and frees what only the call has used.
  // Throws the call's error.
  void finish();

  // The error of a call that has ended, or null.
  std::exception_ptr error();

  // Whether the GPU has carried out a call that has ended.
  bool is_carried_out() const;

  // The Future of the call `self`, which is completed on the pool.
  static c10::intrusive_ptr<c10::ivalue::Future> future(const std::shared_ptr<CallState>& self);

  // Completes the Future of a call that has ended. Runs its callbacks.
  void complete_future();

  // The rank that has sent the message of a receive that has ended.
  int source() const;

  // The core's handle, which this object frees. Set once, before anybody but the core has this object.
  dl_comm_work_t* handle = nullptr;
  // Ends the profiler's record of the call. Set as `handle`.
  std::function<void()> on_end;
  // The number of bytes that a receive must bring; 0 for anything else.
  std::size_t expected_bytes = 0;
  Call call;

 private:
  // As `finish`, on the stream of the call, for a thread that has no stream of its own.
  void finish_on_own_stream();
  c10::IValue value() const;

  const uint64_t number_;
  const std::shared_ptr<FutureQueue> queue_;
  // Whether the callback of another Future has started the call.
  const bool nested_;
  const std::optional<c10::Stream> stream_;
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

// Seconds for the core; 0, the group's deadline, for the times that torch uses for none.
double to_seconds(std::chrono::milliseconds time);

}  // namespace dl_comm::c10d_backend
