// Allreduce, broadcast and user-defined reductions.
//
// An operation runs on the thread of its stream. Operations of a communicator run in the order of their calls, on
// whatever streams.
#include <algorithm>
#include <cstring>
#include <memory>

#include "exports.h"
#include "nccl_comm.h"

using namespace fake;

namespace {

enum TaskKind { kAllReduce = 1, kBroadcast = 2 };

struct Operation {
  std::shared_ptr<Comm> comm;
  Task task;
  ncclDataType_t dtype;
  UserReduction how;
  CUdeviceptr send, receive;
  CUstream stream;
};

bool sends(const Operation& op) { return op.task.kind == kAllReduce || op.task.root == op.comm->rank; }

// The host address of a part of an operation's memory. Checked for each part, in case the memory was freed.
char* part(CUdeviceptr start, std::size_t offset, std::size_t bytes, const char* what) {
  return bytes == 0 ? nullptr : static_cast<char*>(fake_cuda_host_address(start + offset, bytes, what));
}

// Runs one round for `bytes` bytes at `offset`. False if aborted.
bool run_round(const Operation& op, std::size_t offset, std::size_t bytes) {
  Segment& segment = op.comm->segment;
  const auto should_abort = [&op] { return op.comm->aborted(); };
  char* own = segment.fill(should_abort);
  if (own == nullptr) return false;
  if (sends(op) && bytes > 0) std::memcpy(own, part(op.send, offset, bytes, "NCCL, send buffer"), bytes);
  if (!segment.post(op.task, should_abort)) return false;
  if (bytes > 0) {
    char* target = part(op.receive, offset, bytes, "NCCL, receive buffer");
    if (op.task.kind == kBroadcast) {
      std::memcpy(target, segment.buffer(op.task.root), bytes);
    } else {
      std::vector<const char*> sources;
      for (int rank = 0; rank < op.comm->nranks; ++rank) sources.push_back(segment.buffer(rank));
      reduce(op.dtype, op.how.reduction, sources, target, bytes / size_of(op.dtype));
    }
  }
  segment.done();
  return true;
}

void run(void* argument) {
  const std::unique_ptr<Operation> op(static_cast<Operation*>(argument));
  Comm& comm = *op->comm;
  for (int round = 0; comm.finished != op->task.number; backoff(round)) {
    if (comm.aborted()) return;
  }
  const std::size_t size = size_of(op->dtype), bytes = size * op->task.count;
  if (op->how.scalar != 0) {
    std::memcpy(&op->how.reduction.scalar, fake_cuda_host_address(op->how.scalar, size, "NCCL, scalar"), size);
  }
  std::size_t offset = 0;
  do {
    const std::size_t length = std::min(kChunk, bytes - offset);
    if (!run_round(*op, offset, length)) return;
    offset += length;
  } while (offset < bytes);
  ++comm.finished;
}

// The job of a call: enqueues the operation on its stream.
ncclResult_t give_to_stream(Operation op) {
  op.task.number = op.comm->issued++;
  const CUstream stream = op.stream;
  auto owned = std::make_unique<Operation>(std::move(op));
  const CUresult refused = fake_cuda_enqueue(stream, run, owned.get());
  if (refused != CUDA_SUCCESS) {
    return failed(ncclUnhandledCudaError, "the stream refused the operation: " + std::to_string(refused));
  }
  owned.release();  // `run` frees it
  return ncclSuccess;
}

// Checks the arguments at once; the job does the rest.
ncclResult_t call(Operation op) {
  const std::size_t size = size_of(op.dtype);
  if (op.comm->finalised) return failed(ncclInvalidUsage, "the communicator is finalized");
  if (size == 0) return failed(ncclInvalidArgument, "the fake has no type " + std::to_string(op.dtype));
  const std::size_t bytes = size * op.task.count;
  if (bytes > 0) {
    if (sends(op)) fake_cuda_host_address(op.send, bytes, "NCCL, send buffer");
    fake_cuda_host_address(op.receive, bytes, "NCCL, receive buffer");
  }
  const auto comm = op.comm;
  return submit(comm, [op = std::move(op)] { return give_to_stream(op); });
}

CUdeviceptr device_address(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

}  // namespace

FAKE_API ncclResult_t ncclAllReduce(const void* send, void* receive, std::size_t count, ncclDataType_t dtype,
                                    ncclRedOp_t reduction, ncclComm_t handle, CUstream stream) {
  std::shared_ptr<Comm> comm;
  if (const ncclResult_t refused = need_ready(handle, &comm)) return refused;
  Operation op = {comm, {}, dtype, {}, device_address(send), device_address(receive), stream};
  if (reduction == ncclAvg) {
    op.how.reduction = average_of(dtype, comm->nranks);
  } else if (reduction >= ncclNumOps) {
    const std::lock_guard lock(comm->lock);
    const auto index = static_cast<std::size_t>(reduction - ncclNumOps);
    if (index >= comm->reductions.size() || !comm->reductions[index].live || comm->reductions[index].dtype != dtype) {
      return failed(ncclInvalidArgument, "no reduction of this communicator and type");
    }
    op.how = comm->reductions[index];
  } else if (reduction != ncclSum) {
    return failed(ncclInvalidArgument, "the fake has no reduction " + std::to_string(reduction));
  }
  op.task.kind = kAllReduce;
  op.task.count = count;
  op.task.dtype = dtype;
  op.task.op = std::min(reduction, ncclNumOps);
  return call(std::move(op));
}

FAKE_API ncclResult_t ncclBroadcast(const void* send, void* receive, std::size_t count, ncclDataType_t dtype, int root,
                                    ncclComm_t handle, CUstream stream) {
  std::shared_ptr<Comm> comm;
  if (const ncclResult_t refused = need_ready(handle, &comm)) return refused;
  if (root < 0 || root >= comm->nranks) return failed(ncclInvalidArgument, "there is no root " + std::to_string(root));
  Operation op = {comm, {}, dtype, {}, device_address(send), device_address(receive), stream};
  op.task.kind = kBroadcast;
  op.task.count = count;
  op.task.dtype = dtype;
  op.task.root = root;
  return call(std::move(op));
}

FAKE_API ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* out, void* scalar, ncclDataType_t dtype,
                                               ncclScalarResidence_t residence, ncclComm_t handle) {
  std::shared_ptr<Comm> comm;
  if (const ncclResult_t refused = need_ready(handle, &comm)) return refused;
  const std::size_t size = size_of(dtype);
  if (out == nullptr || scalar == nullptr || size == 0) return failed(ncclInvalidArgument, "no such reduction");
  UserReduction made;
  made.live = true;
  made.dtype = dtype;
  made.reduction.scaled = true;
  if (residence == ncclScalarHostImmediate) {
    std::memcpy(&made.reduction.scalar, scalar, size);
  } else {
    made.scalar = device_address(scalar);
    fake_cuda_host_address(made.scalar, size, "NCCL, scalar");
  }
  const std::lock_guard lock(comm->lock);
  comm->reductions.push_back(made);
  *out = ncclNumOps + static_cast<int>(comm->reductions.size()) - 1;
  return ncclSuccess;
}

FAKE_API ncclResult_t ncclRedOpDestroy(ncclRedOp_t reduction, ncclComm_t handle) {
  std::shared_ptr<Comm> comm;
  if (const ncclResult_t refused = need_ready(handle, &comm)) return refused;
  const std::lock_guard lock(comm->lock);
  const auto index = static_cast<std::size_t>(reduction - ncclNumOps);
  if (reduction < ncclNumOps || index >= comm->reductions.size() || !comm->reductions[index].live) {
    return failed(ncclInvalidArgument, "no reduction of this communicator");
  }
  comm->reductions[index].live = false;
  return ncclSuccess;
}
