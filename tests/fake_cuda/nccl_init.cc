// Communicators: unique ids, init, finalize, destroy, abort and queries.
#include <climits>
#include <cstring>

#include "exports.h"
#include "nccl_comm.h"

using namespace fake;

FAKE_API ncclResult_t ncclGetVersion(int* version) {
  if (version == nullptr) return failed(ncclInvalidArgument, "ncclGetVersion: no place for it");
  *version = 22809;
  return ncclSuccess;
}

FAKE_API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  if (id == nullptr) return failed(ncclInvalidArgument, "ncclGetUniqueId: no place for it");
  const std::string name = Segment::create();
  if (name.empty()) return failed(ncclSystemError, "no room in /dev/shm");
  *id = {};
  std::memcpy(id->internal, name.c_str(), name.size());
  return ncclSuccess;
}

FAKE_API ncclResult_t ncclCommInitRankConfig(ncclComm_t* handle, int nranks, ncclUniqueId id, int rank,
                                             const ncclConfig_t* config) {
  if (handle == nullptr || nranks < 1 || nranks > kMaxRanks || rank < 0 || rank >= nranks) {
    return failed(ncclInvalidArgument, "init: rank " + std::to_string(rank) + " of " + std::to_string(nranks));
  }
  if (config != nullptr && (config->magic != kNcclConfigMagic || config->size < sizeof(ncclConfig_t))) {
    return failed(ncclInvalidArgument, "init: the configuration was not initialised");
  }
  const int asked = config != nullptr ? config->blocking : INT_MIN;
  if (asked != INT_MIN && asked != 0 && asked != 1) return failed(ncclInvalidArgument, "init: blocking is 0 or 1");
  const std::string name(id.internal, strnlen(id.internal, sizeof id.internal));
  CUdevice device = 0;
  GpuId gpu = {};
  if (cuCtxGetDevice(&device) != CUDA_SUCCESS ||
      cuDeviceGetPCIBusId(gpu.bus_id, sizeof gpu.bus_id, device) != CUDA_SUCCESS) {
    return failed(ncclUnhandledCudaError, "init: there is no current context");
  }

  const auto comm = std::make_shared<Comm>(nranks, rank, device, asked != 0);
  *handle = comms().add(comm);
  const ncclResult_t result = submit(comm, [comm = comm.get(), name, gpu] { return comm->join(name, gpu); });
  if (result != ncclSuccess && result != ncclInProgress) {
    comms().remove(*handle);
    *handle = nullptr;
  }
  return result;
}

FAKE_API ncclResult_t ncclCommInitRank(ncclComm_t* handle, int nranks, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(handle, nranks, id, rank, nullptr);
}

FAKE_API ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* error) {
  const auto comm = comms().find(handle);
  if (comm == nullptr || error == nullptr) return failed(ncclInvalidArgument, "this is no communicator");
  *error = comm->state();
  return ncclSuccess;
}

FAKE_API ncclResult_t ncclCommFinalize(ncclComm_t handle) {
  std::shared_ptr<Comm> comm;
  if (const ncclResult_t refused = need_ready(handle, &comm)) return refused;
  if (comm->finalised.exchange(true)) return failed(ncclInvalidArgument, "the communicator is finalized already");
  return submit(comm, [comm = comm.get()] {
    return comm->drain() ? ncclSuccess : failed(ncclInternalError, "aborted while it was finalized");
  });
}

FAKE_API ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  std::shared_ptr<Comm> comm;
  if (const ncclResult_t refused = need_ready(handle, &comm)) return refused;
  comms().remove(handle);
  comm->drain();
  return ncclSuccess;
}

FAKE_API ncclResult_t ncclCommAbort(ncclComm_t handle) {
  const auto comm = comms().remove(handle);
  if (comm == nullptr) return failed(ncclInvalidArgument, "this is no communicator");
  comm->abort();
  return ncclSuccess;
}

namespace {

ncclResult_t answer(ncclComm_t handle, int* out, int (*ask)(const Comm&)) {
  std::shared_ptr<Comm> comm;
  if (const ncclResult_t refused = need_ready(handle, &comm)) return refused;
  if (out == nullptr) return failed(ncclInvalidArgument, "no place for the answer");
  *out = ask(*comm);
  return ncclSuccess;
}

}  // namespace

FAKE_API ncclResult_t ncclCommCount(ncclComm_t handle, int* count) {
  return answer(handle, count, [](const Comm& comm) { return comm.nranks; });
}

FAKE_API ncclResult_t ncclCommUserRank(ncclComm_t handle, int* rank) {
  return answer(handle, rank, [](const Comm& comm) { return comm.rank; });
}

FAKE_API ncclResult_t ncclCommCuDevice(ncclComm_t handle, int* device) {
  return answer(handle, device, [](const Comm& comm) { return comm.device; });
}
