// Collective operations.
//
// An operation runs on the thread of its stream. Operations of a communicator run in the order of their calls, on
// whatever streams.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>

#include "exports.h"
#include "nccl_comm.h"

using namespace fake;

namespace {

enum TaskKind { kAllReduce = 1, kBroadcast, kReduce, kAllGather, kReduceScatter };

struct Operation {
  std::shared_ptr<Comm> comm;
  Task task;
  ncclDataType_t dtype;
  UserReduction how;
  CUdeviceptr send, receive;
  CUstream stream;
  std::uint64_t order = 0;
};

bool reduces(const Operation& op) { return op.task.kind != kBroadcast && op.task.kind != kAllGather; }
bool is_root(const Operation& op) { return op.task.root == op.comm->rank; }
// The numbers of blocks of `task.count` elements that this rank reads and writes.
std::size_t blocks_read(const Operation& op) {
  if (op.task.kind == kReduceScatter) return static_cast<std::size_t>(op.comm->nranks);
  return op.task.kind == kBroadcast && !is_root(op) ? 0 : 1;
}
std::size_t blocks_written(const Operation& op) {
  if (op.task.kind == kAllGather) return static_cast<std::size_t>(op.comm->nranks);
  return op.task.kind == kReduce && !is_root(op) ? 0 : 1;
}

// The host address of a part of an operation's memory. Checked for each part, in case the memory was freed.
char* part(CUdeviceptr start, std::size_t offset, std::size_t bytes, const char* what) {
  return static_cast<char*>(fake_cuda_host_address(start + offset, bytes, what));
}

// Runs one round for `bytes` bytes at `offset` of every block of `stride` bytes. False if aborted.
bool run_round(const Operation& op, std::size_t offset, std::size_t bytes, std::size_t stride) {
  Segment& segment = op.comm->segment;
  const auto should_abort = [&op] { return op.comm->aborted(); };
  char* own = segment.fill(should_abort);
  if (own == nullptr) return false;
  for (std::size_t block = 0; block < blocks_read(op) && bytes > 0; ++block) {
    std::memcpy(own + block * bytes, part(op.send, block * stride + offset, bytes, "NCCL, send buffer"), bytes);
  }
  if (!segment.post(op.task, should_abort)) return false;
  const std::size_t mine = op.task.kind == kReduceScatter ? static_cast<std::size_t>(op.comm->rank) * bytes : 0;
  for (std::size_t block = 0; block < blocks_written(op) && bytes > 0; ++block) {
    char* target = part(op.receive, block * stride + offset, bytes, "NCCL, receive buffer");
    if (reduces(op)) {
      std::vector<const char*> sources;
      for (int rank = 0; rank < op.comm->nranks; ++rank) sources.push_back(segment.buffer(rank) + mine);
      reduce(op.dtype, op.how.reduction, sources, target, bytes / size_of(op.dtype));
    } else {
      std::memcpy(target, segment.buffer(op.task.kind == kAllGather ? static_cast<int>(block) : op.task.root), bytes);
    }
  }
  segment.done();
  return true;
}

void run(void* argument) {
  const std::unique_ptr<Operation> op(static_cast<Operation*>(argument));
  Comm& comm = *op->comm;
  for (int round = 0; comm.finished != op->order; backoff(round)) {
    if (comm.aborted()) return;
  }
  const std::size_t size = size_of(op->dtype), bytes = size * op->task.count;
  if (op->how.scalar != 0) {
    std::memcpy(&op->how.reduction.scalar, fake_cuda_host_address(op->how.scalar, size, "NCCL, scalar"), size);
  }
  // A rank's buffer has the parts of all blocks.
  const auto ranks = static_cast<std::size_t>(comm.nranks);
  const std::size_t chunk = op->task.kind == kReduceScatter ? kChunk / ranks / 16 * 16 : kChunk;
  std::size_t offset = 0;
  do {
    const std::size_t length = std::min(chunk, bytes - offset);
    if (!run_round(*op, offset, length, bytes)) return;
    offset += length;
  } while (offset < bytes);
  ++comm.finished;
}

// An operation at its place in the order of its communicator. `run` frees it.
void* in_order(void* prototype) {
  auto op = std::make_unique<Operation>(*static_cast<const Operation*>(prototype));
  op->order = op->comm->issued++;
  op->task.number = op->comm->collectives++;
  return op.release();
}

// The job of a call: enqueues the operation on its stream.
ncclResult_t give_to_stream(const Operation& op) {
  static constexpr FakeOperation how = {in_order, run, [](void* op) { delete static_cast<Operation*>(op); }};
  const CUresult refused = fake_cuda_enqueue_made(op.stream, &how, new Operation(op));
  if (refused != CUDA_SUCCESS) {
    return failed(ncclUnhandledCudaError, "the stream refused the operation: " + std::to_string(refused));
  }
  return ncclSuccess;
}

CUdeviceptr device_address(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

// Checks the arguments at once; the job does the rest. `reduction` and `root` are used by the kinds that have them.
ncclResult_t call(TaskKind kind, const void* send, void* receive, std::size_t count, ncclDataType_t dtype,
                  ncclRedOp_t reduction, int root, ncclComm_t handle, CUstream stream) {
  std::shared_ptr<Comm> comm;
  if (const ncclResult_t refused = need_ready(handle, &comm)) return refused;
  if (root < 0 || root >= comm->nranks) return failed(ncclInvalidArgument, "there is no root " + std::to_string(root));
  const std::size_t size = size_of(dtype);
  if (size == 0) return failed(ncclInvalidArgument, "the fake has no type " + std::to_string(dtype));
  Operation op = {comm, {}, dtype, {}, device_address(send), device_address(receive), stream};
  op.task.kind = kind;
  op.task.count = count;
  op.task.dtype = dtype;
  op.task.root = root;
  if (reduces(op)) {
    if (const ncclResult_t refused = find_reduction(*comm, reduction, dtype, &op.how)) return refused;
    op.task.op = std::min(reduction, ncclNumOps);
  }
  if (comm->finalised) return failed(ncclInvalidUsage, "the communicator is finalized");
  const std::size_t bytes = size * count, read = bytes * blocks_read(op), written = bytes * blocks_written(op);
  if (read > 0) fake_cuda_host_address(op.send, read, "NCCL, send buffer");
  if (written > 0) fake_cuda_host_address(op.receive, written, "NCCL, receive buffer");
  return submit(comm, [op = std::move(op)] { return give_to_stream(op); });
}

}  // namespace

FAKE_API ncclResult_t ncclAllReduce(const void* send, void* receive, std::size_t count, ncclDataType_t dtype,
                                    ncclRedOp_t reduction, ncclComm_t handle, CUstream stream) {
  return call(kAllReduce, send, receive, count, dtype, reduction, 0, handle, stream);
}

FAKE_API ncclResult_t ncclBroadcast(const void* send, void* receive, std::size_t count, ncclDataType_t dtype, int root,
                                    ncclComm_t handle, CUstream stream) {
  return call(kBroadcast, send, receive, count, dtype, ncclSum, root, handle, stream);
}

FAKE_API ncclResult_t ncclReduce(const void* send, void* receive, std::size_t count, ncclDataType_t dtype,
                                 ncclRedOp_t reduction, int root, ncclComm_t handle, CUstream stream) {
  return call(kReduce, send, receive, count, dtype, reduction, root, handle, stream);
}

FAKE_API ncclResult_t ncclAllGather(const void* send, void* receive, std::size_t count, ncclDataType_t dtype,
                                    ncclComm_t handle, CUstream stream) {
  return call(kAllGather, send, receive, count, dtype, ncclSum, 0, handle, stream);
}

FAKE_API ncclResult_t ncclReduceScatter(const void* send, void* receive, std::size_t count, ncclDataType_t dtype,
                                        ncclRedOp_t reduction, ncclComm_t handle, CUstream stream) {
  return call(kReduceScatter, send, receive, count, dtype, reduction, 0, handle, stream);
}
