// Streams: queues of operations, each run in order by a thread; and marks, which implement events.
//
// Thread rule: any thread, but an operation must not wait for its own stream. The thread starts with the first
// operation and keeps its stream alive. It ends when the stream is closed and the queue is empty.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "abort.h"
#include "context.h"
#include "cuda_api.h"
#include "graph.h"

namespace fake {

// Whether a global-mode stream capture forbids capture-unsafe calls on this thread. A thread opts out with
// cuThreadExchangeStreamCaptureMode. Checked by cuEventQuery and cuMemAlloc.
bool capture_forbids();

// With FAKE_CUDA_WAITING_CALLS=1, waits for all work of the context. The real driver may do so when it frees memory,
// allocates host memory, or loads a module.
void wait_if_calls_block(Context& context);

// A point in a stream, passed or not.
class Mark {
 public:
  void pass();
  // Also returns after a sticky error.
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

  // While the stream is being captured, the graph gets the operation.
  CUresult push(std::function<void()> operation);
  // As `push`, for an operation that `maker` makes for each time that it runs.
  CUresult push_made(const Graph::Maker& maker);
  // Blocks until all earlier operations have run.
  CUresult finish();
  // CUDA_SUCCESS if all operations have run, else CUDA_ERROR_NOT_READY.
  CUresult query();
  // No operation may follow.
  void close();

  // The graph that captures the stream, or null.
  std::shared_ptr<Graph> graph();
  // Begins a capture, or ends it with null; returns the graph before.
  std::shared_ptr<Graph> set_graph(std::shared_ptr<Graph> graph);

  Context* const context;

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  struct Operation {
    std::function<void()> run;
    // Its number in the context's order of operations.
    std::uint64_t number;
  };
  std::deque<Operation> queue_;
  std::uint64_t pushed_ = 0;
  std::uint64_t finished_ = 0;
  bool started_ = false;
  bool closed_ = false;
  std::shared_ptr<Graph> graph_;
};

Handles<Graph, CUgraph>& graphs();

// The stream of a handle. 0 and 1 (the same stream) and 2 belong to the current context.
CUresult need_stream(CUstream handle, std::shared_ptr<Stream>* stream);

}  // namespace fake
