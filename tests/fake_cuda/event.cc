// cuEvent* and cuStreamWaitEvent.
//
// A record gives the event a new mark. A wait or query refers to the event's mark at that time. An event that was never
// recorded counts as passed. A record on a stream under capture is a point of its graph, for which only streams can
// wait.
#include "abort.h"
#include "faults.h"
#include "stream.h"

using namespace fake;

namespace {

struct Event {
  explicit Event(Context* context) : context(context) {}

  Context* const context;
  std::mutex mutex;
  // Null until the first record; guarded by `mutex`, as are the others.
  std::shared_ptr<Mark> mark;
  std::shared_ptr<Graph> graph;
  const Stream* stream = nullptr;
  std::uint64_t point = 0;

  std::shared_ptr<Mark> latest() {
    const std::lock_guard lock(mutex);
    return mark;
  }
  bool captured() {
    const std::lock_guard lock(mutex);
    return graph != nullptr;
  }
};

Handles<Event, CUevent>& events() { return never_destroyed<Handles<Event, CUevent>>(); }

CUresult need_event(CUevent handle, std::shared_ptr<Event>* event) {
  Context* context = nullptr;
  if (const CUresult refused = need_context(&context)) return refused;
  *event = events().find(handle);
  return *event != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

}  // namespace

FAKE_API CUresult cuEventCreate(CUevent* handle, unsigned flags) {
  Context* context = nullptr;
  if (const CUresult refused = need_context(&context)) return refused;
  if (handle == nullptr || flags > 7) return CUDA_ERROR_INVALID_VALUE;
  if ((flags & CU_EVENT_INTERPROCESS) != 0) return CUDA_ERROR_NOT_SUPPORTED;
  *handle = events().add(std::make_shared<Event>(context));
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuEventDestroy_v2(CUevent handle) {
  Context* context = nullptr;
  if (const CUresult refused = need_context(&context)) return refused;
  return events().remove(handle) != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

FAKE_API CUresult cuEventRecord(CUevent handle, CUstream stream_handle) {
  std::shared_ptr<Event> event;
  std::shared_ptr<Stream> stream;
  if (const CUresult refused = need_event(handle, &event)) return refused;
  if (const CUresult refused = need_stream(stream_handle, &stream)) return refused;
  if (event->context != stream->context) return CUDA_ERROR_INVALID_HANDLE;
  const std::lock_guard lock(event->mutex);
  event->graph = stream->graph();
  if (event->graph != nullptr) {
    event->stream = stream.get();
    event->point = event->graph->record(stream.get());
    return CUDA_SUCCESS;
  }
  const auto mark = std::make_shared<Mark>();
  if (const CUresult refused = stream->push([mark] { mark->pass(); })) return refused;
  event->mark = mark;
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuEventQuery(CUevent handle) {
  std::shared_ptr<Event> event;
  if (const CUresult refused = need_event(handle, &event)) return refused;
  if (capture_forbids()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (event->captured()) return CUDA_ERROR_CAPTURED_EVENT;
  const auto mark = event->latest();
  return mark == nullptr || mark->passed() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

FAKE_API CUresult cuEventSynchronize(CUevent handle) {
  std::shared_ptr<Event> event;
  if (const CUresult refused = need_event(handle, &event)) return refused;
  if (event->captured()) return CUDA_ERROR_CAPTURED_EVENT;
  if (const auto mark = event->latest()) mark->wait();
  return fault();
}

FAKE_API CUresult cuStreamWaitEvent(CUstream stream_handle, CUevent handle, unsigned flags) {
  std::shared_ptr<Event> event;
  std::shared_ptr<Stream> stream;
  if (const CUresult refused = need_event(handle, &event)) return refused;
  if (const CUresult refused = need_stream(stream_handle, &stream)) return refused;
  if (flags > 1) return CUDA_ERROR_INVALID_VALUE;
  {
    const std::lock_guard lock(event->mutex);
    const auto graph = stream->graph();
    if (event->graph != nullptr) {
      if (graph != nullptr && graph != event->graph) return CUDA_ERROR_STREAM_CAPTURE_MERGE;
      event->graph->join(stream, event->stream, event->point);
      stream->set_graph(event->graph);
      return CUDA_SUCCESS;
    }
    if (graph != nullptr && event->mark != nullptr) return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
  }
  const auto mark = event->latest();
  if (mark == nullptr) return CUDA_SUCCESS;
  return stream->push([mark] { mark->wait(); });
}
