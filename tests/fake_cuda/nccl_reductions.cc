// Reductions: NCCL's own, and those that the user makes.
#include <cstring>
#include <memory>

#include "exports.h"
#include "nccl_comm.h"

namespace fake {

ncclResult_t find_reduction(Comm& comm, ncclRedOp_t op, ncclDataType_t dtype, UserReduction* how) {
  switch (op) {
    case ncclSum:
    case ncclProd:
    case ncclMax:
    case ncclMin:
      how->reduction.op = op;
      return ncclSuccess;
    case ncclAvg:
      how->reduction = average_of(dtype, comm.nranks);
      return ncclSuccess;
    default:
      break;
  }
  const std::lock_guard lock(comm.lock);
  const auto index = static_cast<std::size_t>(op - ncclNumOps);
  if (op < ncclNumOps || index >= comm.reductions.size() || !comm.reductions[index].live ||
      comm.reductions[index].dtype != dtype) {
    return failed(ncclInvalidArgument, "no reduction of this communicator and type");
  }
  *how = comm.reductions[index];
  return ncclSuccess;
}

}  // namespace fake

using namespace fake;

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
    made.scalar = reinterpret_cast<CUdeviceptr>(scalar);
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
