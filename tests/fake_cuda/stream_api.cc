// cuStream*, except the memory operations (values.cc) and events (event.cc).
#include <atomic>
#include <utility>

#include "abort.h"
#include "faults.h"
#include "stream.h"

namespace fake {
namespace {

constexpr int kGlobalCapture = 0;
std::atomic<int> global_captures{0};
thread_local int capture_mode = kGlobalCapture;

Handles<Stream, CUstream>& streams() { return never_destroyed<Handles<Stream, CUstream>>(); }

// Index of the context's own stream for a handle, or -1. 0 and 1 are one stream, as in the driver.
int special(CUstream handle) {
  switch (reinterpret_cast<std::uintptr_t>(handle)) {
    case 0:
    case 1:
      return 0;
    case 2:
      return 1;
    default:
      return -1;
  }
}

}  // namespace

bool capture_forbids() { return global_captures > 0 && capture_mode == kGlobalCapture; }

void wait_if_calls_block(Context& context) {
  static const bool wait = setting("FAKE_CUDA_WAITING_CALLS", 0) != 0;
  if (!wait) return;
  std::vector<std::shared_ptr<Stream>> all;
  {
    const std::lock_guard lock(context.lock);
    for (const auto& each : context.streams) {
      if (auto stream = each.lock()) all.push_back(std::move(stream));
    }
    context.streams.assign(all.begin(), all.end());
  }
  // A wait on a captured stream fails.
  for (const auto& stream : all) stream->finish();
}

CUresult need_stream(CUstream handle, std::shared_ptr<Stream>* stream) {
  Context* context = nullptr;
  if (const CUresult refused = need_context(&context)) return refused;
  const int own = special(handle);
  if (own < 0) {
    *stream = streams().find(handle);
    return *stream != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
  }
  const std::lock_guard lock(context->lock);
  if (context->special[own] == nullptr) {
    context->special[own] = std::make_shared<Stream>(context);
    context->streams.push_back(context->special[own]);
  }
  *stream = context->special[own];
  return CUDA_SUCCESS;
}

}  // namespace fake

using namespace fake;

FAKE_API CUresult cuStreamCreateWithPriority(CUstream* handle, unsigned flags, int) {
  Context* context = nullptr;
  if (const CUresult refused = need_context(&context)) return refused;
  if (handle == nullptr || flags > CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
  const auto stream = std::make_shared<Stream>(context);
  {
    const std::lock_guard lock(context->lock);
    context->streams.push_back(stream);
  }
  *handle = streams().add(stream);
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuStreamCreate(CUstream* handle, unsigned flags) {
  return cuStreamCreateWithPriority(handle, flags, 0);
}

FAKE_API CUresult cuStreamDestroy_v2(CUstream handle) {
  Context* context = nullptr;
  if (const CUresult refused = need_context(&context)) return refused;
  const std::shared_ptr<Stream> stream = streams().remove(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  stream->close();
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuStreamSynchronize(CUstream handle) {
  std::shared_ptr<Stream> stream;
  if (const CUresult refused = need_stream(handle, &stream)) return refused;
  return stream->finish();
}

FAKE_API CUresult cuStreamQuery(CUstream handle) {
  std::shared_ptr<Stream> stream;
  if (const CUresult refused = need_stream(handle, &stream)) return refused;
  return stream->query();
}

FAKE_API CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
  std::shared_ptr<Stream> stream;
  if (const CUresult refused = need_stream(handle, &stream)) return refused;
  if (status == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *status = stream->graph() != nullptr ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuStreamBeginCapture_v2(CUstream handle, int mode) {
  std::shared_ptr<Stream> stream;
  if (const CUresult refused = need_stream(handle, &stream)) return refused;
  if (mode < 0 || mode > 2) return CUDA_ERROR_INVALID_VALUE;
  if (special(handle) == 0) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (stream->graph() != nullptr) return CUDA_ERROR_ILLEGAL_STATE;
  stream->set_graph(std::make_shared<Graph>(stream.get()));
  if (mode == kGlobalCapture) ++global_captures;
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuStreamEndCapture(CUstream handle, CUgraph* graph) {
  std::shared_ptr<Stream> stream;
  if (const CUresult refused = need_stream(handle, &stream)) return refused;
  if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *graph = nullptr;
  const std::shared_ptr<Graph> captured = stream->set_graph(nullptr);
  if (captured == nullptr) return CUDA_ERROR_ILLEGAL_STATE;
  // Captures in other modes are not counted; tests use the global mode.
  if (global_captures > 0) --global_captures;
  std::vector<std::shared_ptr<Stream>> others;
  const bool joined = captured->end(&others);
  for (const auto& other : others) other->set_graph(nullptr);
  if (!joined) return CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
  *graph = graphs().add(captured);
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuThreadExchangeStreamCaptureMode(int* mode) {
  if (fault() != CUDA_SUCCESS) return fault();
  if (mode == nullptr || *mode < 0 || *mode > 2) return CUDA_ERROR_INVALID_VALUE;
  std::swap(*mode, capture_mode);
  return CUDA_SUCCESS;
}
