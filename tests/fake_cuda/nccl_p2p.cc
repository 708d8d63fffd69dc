// See nccl_p2p.h.
#include "nccl_p2p.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <string>

#include "exports.h"
#include "nccl_arithmetic.h"

namespace fake {
namespace {

// A message and how much of it is done.
struct Transfer {
  Message message;
  std::size_t done = 0;
};

// The messages for or from one peer, which take place in the order of their calls.
using Queue = std::deque<Transfer>;

struct Batch {
  std::shared_ptr<Comm> comm;
  std::uint64_t order = 0;
  std::map<std::pair<int, bool>, Queue> queues;
};

char* place(const Transfer& transfer, std::size_t bytes) {
  const char* what = transfer.message.sends ? "NCCL, send buffer" : "NCCL, receive buffer";
  return bytes == 0 ? nullptr
                    : static_cast<char*>(fake_cuda_host_address(transfer.message.memory + transfer.done, bytes, what));
}

// Moves the next part of the queue's first message, if the peer lets it. Returns whether it did.
bool progress(Comm& comm, Queue& queue) {
  Transfer& transfer = queue.front();
  const Message& message = transfer.message;
  const std::size_t bytes = std::min(kMessageChunk, message.header.bytes - transfer.done);
  Segment& segment = comm.segment;
  if (message.sends) {
    char* target = segment.fill_message(message.peer);
    if (target == nullptr) return false;
    if (bytes > 0) std::memcpy(target, place(transfer, bytes), bytes);
    segment.post_message(message.peer, message.header);
  } else {
    const char* source = segment.next_message(message.peer, message.header);
    if (source == nullptr) return false;
    if (bytes > 0) std::memcpy(place(transfer, bytes), source, bytes);
    segment.message_read(message.peer);
  }
  transfer.done += bytes;
  if (transfer.done == message.header.bytes) queue.pop_front();
  return true;
}

void run(void* argument) {
  const std::unique_ptr<Batch> batch(static_cast<Batch*>(argument));
  Comm& comm = *batch->comm;
  for (int round = 0; comm.finished != batch->order; backoff(round)) {
    if (comm.aborted()) return;
  }
  auto& queues = batch->queues;
  for (int round = 0; !queues.empty();) {
    bool moved = false;
    for (auto entry = queues.begin(); entry != queues.end();) {
      moved = progress(comm, entry->second) || moved;
      entry = entry->second.empty() ? queues.erase(entry) : std::next(entry);
    }
    if (comm.aborted()) return;
    if (moved) {
      round = 0;
    } else {
      backoff(round);
    }
  }
  ++comm.finished;
}

// A batch at its place in the order of its communicator. `run` frees it.
void* in_order(void* prototype) {
  auto batch = std::make_unique<Batch>(*static_cast<const Batch*>(prototype));
  batch->order = batch->comm->issued++;
  return batch.release();
}

ncclResult_t give_to_stream(const std::shared_ptr<Comm>& comm, const Messages& messages) {
  auto batch = std::make_unique<Batch>();
  batch->comm = comm;
  for (const Message& message : messages.list) batch->queues[{message.peer, message.sends}].push_back({message});
  const Queue &sent = batch->queues[{comm->rank, true}], &received = batch->queues[{comm->rank, false}];
  const auto same = [](const Transfer& a, const Transfer& b) {
    return a.message.header.bytes == b.message.header.bytes && a.message.header.dtype == b.message.header.dtype;
  };
  if (!std::equal(sent.begin(), sent.end(), received.begin(), received.end(), same)) {
    return failed(ncclInvalidUsage, "a rank sends to itself what it does not receive in the same group");
  }
  for (auto entry = batch->queues.begin(); entry != batch->queues.end();) {
    entry = entry->second.empty() ? batch->queues.erase(entry) : std::next(entry);
  }
  static constexpr FakeOperation how = {in_order, run, [](void* batch) { delete static_cast<Batch*>(batch); }};
  const CUresult refused = fake_cuda_enqueue_made(messages.stream, &how, batch.release());
  if (refused != CUDA_SUCCESS) {
    return failed(ncclUnhandledCudaError, "the stream refused the messages: " + std::to_string(refused));
  }
  return ncclSuccess;
}

ncclResult_t call(bool sends, const void* memory, std::size_t count, ncclDataType_t dtype, int peer, ncclComm_t handle,
                  CUstream stream) {
  std::shared_ptr<Comm> comm;
  if (const ncclResult_t refused = need_ready(handle, &comm)) return refused;
  if (comm->finalised) return failed(ncclInvalidUsage, "the communicator is finalized");
  if (peer < 0 || peer >= comm->nranks) return failed(ncclInvalidArgument, "no rank " + std::to_string(peer));
  const std::size_t size = size_of(dtype);
  if (size == 0) return failed(ncclInvalidArgument, "the fake has no type " + std::to_string(dtype));
  Message message;
  message.sends = sends;
  message.peer = peer;
  message.memory = reinterpret_cast<CUdeviceptr>(memory);
  message.header.bytes = size * count;
  message.header.dtype = dtype;
  if (count > 0) {
    fake_cuda_host_address(message.memory, size * count, sends ? "NCCL, send buffer" : "NCCL, receive buffer");
  }
  return submit_message(comm, stream, message);
}

}  // namespace

Comm::Job messages_job(const std::shared_ptr<Comm>& comm, const std::shared_ptr<Messages>& messages) {
  return [comm = std::weak_ptr<Comm>(comm), messages] {
    const auto held = comm.lock();
    return held == nullptr ? ncclInternalError : give_to_stream(held, *messages);
  };
}

}  // namespace fake

using namespace fake;

FAKE_API ncclResult_t ncclSend(const void* send, std::size_t count, ncclDataType_t dtype, int peer, ncclComm_t handle,
                               CUstream stream) {
  return call(true, send, count, dtype, peer, handle, stream);
}

FAKE_API ncclResult_t ncclRecv(void* receive, std::size_t count, ncclDataType_t dtype, int peer, ncclComm_t handle,
                               CUstream stream) {
  return call(false, receive, count, dtype, peer, handle, stream);
}
