// See graph.h; and cuGraph*.
#include "graph.h"

#include <algorithm>
#include <utility>

#include "abort.h"
#include "stream.h"

namespace fake {

void Graph::add(const Stream* stream, Maker maker) {
  const std::lock_guard lock(mutex_);
  makers_.push_back(std::move(maker));
  ++given_[stream];
}

std::uint64_t Graph::record(const Stream* stream) {
  const std::lock_guard lock(mutex_);
  return given_[stream];
}

void Graph::join(std::shared_ptr<Stream> stream, const Stream* other, std::uint64_t point) {
  const std::lock_guard lock(mutex_);
  joined_[other] = std::max(joined_[other], point);
  ++given_[stream.get()];  // the wait
  if (stream.get() != origin_ && std::find(others_.begin(), others_.end(), stream) == others_.end()) {
    others_.push_back(std::move(stream));
  }
}

bool Graph::end(std::vector<std::shared_ptr<Stream>>* others) {
  const std::lock_guard lock(mutex_);
  *others = std::exchange(others_, {});
  return std::all_of(others->begin(), others->end(),
                     [this](const auto& stream) { return joined_[stream.get()] == given_[stream.get()]; });
}

std::vector<std::function<void()>> Graph::make() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::function<void()>> made;
  for (const Maker& maker : makers_) made.push_back(maker());
  return made;
}

namespace {

struct Executable {
  std::shared_ptr<Graph> graph;
};

Handles<Executable, CUgraphExec>& executables() { return never_destroyed<Handles<Executable, CUgraphExec>>(); }

}  // namespace

Handles<Graph, CUgraph>& graphs() { return never_destroyed<Handles<Graph, CUgraph>>(); }

}  // namespace fake

using namespace fake;

FAKE_API CUresult cuGraphInstantiateWithFlags(CUgraphExec* handle, CUgraph graph, unsigned long long) {
  const std::shared_ptr<Graph> found = graphs().find(graph);
  if (found == nullptr || handle == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  *handle = executables().add(std::make_shared<Executable>(Executable{found}));
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuGraphLaunch(CUgraphExec handle, CUstream stream_handle) {
  const std::shared_ptr<Executable> executable = executables().find(handle);
  std::shared_ptr<Stream> stream;
  if (executable == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (const CUresult refused = need_stream(stream_handle, &stream)) return refused;
  for (auto& operation : executable->graph->make()) {
    if (const CUresult refused = stream->push(std::move(operation))) return refused;
  }
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuGraphExecDestroy(CUgraphExec handle) {
  return executables().remove(handle) != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

FAKE_API CUresult cuGraphDestroy(CUgraph handle) {
  return graphs().remove(handle) != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
