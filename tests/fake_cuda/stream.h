// Streams: queues of operations, each with a thread that runs them in order; and marks, which events are made of.
//
// Thread rule: everything may be called from any thread, but for what a thread of a stream runs: that must not wait for
// its own stream. The thread starts at the first operation, holds its stream while it runs, and ends when the stream is
// closed and the queue empty.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "context.h"
#include "cuda_api.h"

namespace fake {

// Whether a stream is captured in the global mode, in which no thread may call what is not for captures, unless it has
// left that to others (cuThreadExchangeStreamCaptureMode). The fake asks in cuEventQuery and cuMemAlloc.
bool capture_forbids();

// With FAKE_CUDA_WAITING_CALLS=1, waits until all that the context's streams have been given is done, as the driver may
// where memory is freed, memory of the host allocated, or a module loaded.
void wait_if_calls_do(Context& context);

// A point in a stream that has been passed, or not yet.
class Mark {
 public:
  void pass();
  // Ends early after a fault.
  void wait();
  bool passed();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool passed_ = false;
};

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  explicit Stream(Context* context) : context(context) {}

  // Refused while the stream is captured: the fake has no graphs.
  CUresult push(std::function<void()> operation);
  // Blocks until all that was pushed before has run.
  CUresult finish();
  // CUDA_SUCCESS when all has run, else CUDA_ERROR_NOT_READY.
  CUresult query();
  // No more operations come.
  void close();

  bool capturing();
  // False when it was so already.
  bool set_capturing(bool capturing);

  Context* const context;

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  struct Operation {
    std::function<void()> run;
    // Its place in the order of the context's one queue.
    std::uint64_t place;
  };
  std::deque<Operation> queue_;
  std::uint64_t pushed_ = 0;
  std::uint64_t finished_ = 0;
  bool started_ = false;
  bool closed_ = false;
  bool capturing_ = false;
};

// The stream of a handle; 0 and 1, which are the same, and 2 are streams of the current context.
CUresult need_stream(CUstream handle, std::shared_ptr<Stream>* stream);

}  // namespace fake
