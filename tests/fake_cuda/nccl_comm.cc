// See nccl_comm.h.
#include "nccl_comm.h"

#include <cstring>
#include <thread>

#include "exports.h"

namespace fake {

Handles<Comm, ncclComm_t>& comms() { return never_destroyed<Handles<Comm, ncclComm_t>>(); }

void Comm::start(std::vector<Job> jobs) {
  CUcontext context = nullptr;
  {
    // The driver fails if the process is exiting, has a sticky error, or was forked after cuInit.
    const bool usable = cuCtxGetCurrent(&context) == CUDA_SUCCESS;
    const std::lock_guard guard(mutex_);
    state_ = usable ? ncclInProgress : failed(ncclUnhandledCudaError, "the driver gives no current context");
    if (!usable) return;
  }
  std::thread([self = shared_from_this(), jobs = std::move(jobs), context] {
    ncclResult_t result = ncclSuccess;
    if (cuCtxSetCurrent(context) != CUDA_SUCCESS) {
      result = failed(ncclUnhandledCudaError, "the caller's context cannot be made current");
    }
    random_delay();
    for (const Job& job : jobs) {
      if (result == ncclSuccess) result = job();
    }
    const std::lock_guard guard(self->mutex_);
    self->state_ = result;
    self->changed_.notify_all();
  }).detach();
}

ncclResult_t Comm::wait() {
  std::unique_lock guard(mutex_);
  changed_.wait(guard, [this] { return state_ != ncclInProgress; });
  return state_;
}

ncclResult_t Comm::state() {
  const std::lock_guard guard(mutex_);
  return state_;
}

ncclResult_t Comm::join(const std::string& name, const GpuId& gpu) {
  if (!segment.open(name)) return failed(ncclSystemError, "there is no communicator " + name + " to join");
  if (!segment.arrive(rank, nranks, gpu)) {
    return failed(ncclInvalidUsage, "rank " + std::to_string(rank) + " is taken, or ranks differ in their number");
  }
  if (!segment.wait_for_all([this] { return aborted(); })) return failed(ncclInternalError, "aborted during the init");
  const int other = segment.shares_gpu_with();
  if (other >= 0) {
    return failed(ncclInvalidUsage, "Duplicate GPU detected : rank " + std::to_string(rank) + " and rank " +
                                        std::to_string(other) + " both on CUDA device " + gpu.bus_id);
  }
  if (setting("FAKE_CUDA_NCCL_FAILS", -1) == rank) {
    return failed(ncclSystemError, "a segment of shared memory cannot be extended: no space left on device");
  }
  if (!segment.wait_for_ready([this] { return aborted(); })) {
    return failed(ncclRemoteError, "another rank has given up");
  }
  return ncclSuccess;
}

bool Comm::drain() {
  for (int round = 0; finished < issued; backoff(round)) {
    CUcontext context = nullptr;
    if (aborted() || cuCtxGetCurrent(&context) != CUDA_SUCCESS) return false;
  }
  return true;
}

namespace {

struct LastError {
  std::mutex mutex;
  std::string text;
};

LastError& last_error() { return never_destroyed<LastError>(); }

}  // namespace

ncclResult_t failed(ncclResult_t result, const std::string& message) {
  const std::lock_guard lock(last_error().mutex);
  last_error().text = message;
  return result;
}

ncclResult_t need_ready(ncclComm_t handle, std::shared_ptr<Comm>* comm) {
  *comm = comms().find(handle);
  if (*comm == nullptr) return failed(ncclInvalidArgument, "this is no communicator");
  switch (const ncclResult_t state = (*comm)->state()) {
    case ncclSuccess:
      return ncclSuccess;
    case ncclInProgress:
      return failed(ncclInvalidArgument, "the communicator is used before its previous call has come to an end");
    default:
      return state;
  }
}

}  // namespace fake

using namespace fake;

FAKE_API const char* ncclGetLastError(ncclComm_t) {
  thread_local std::string copy;
  const std::lock_guard lock(last_error().mutex);
  copy = last_error().text;
  return copy.c_str();
}

FAKE_API const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error";
    case ncclSystemError:
      return "unhandled system error";
    case ncclInternalError:
      return "internal error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
  }
  return "unknown result code";
}
