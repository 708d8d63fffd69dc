// Communicators of the fake NCCL: their state, and the work that goes on in the background.
//
// As in NCCL, what a call on a non-blocking communicator asks for is done by a thread of its own after the call has
// returned: the state is ncclInProgress meanwhile, and other calls are refused.
//
// Thread rule: everything may be called from any thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "abort.h"
#include "nccl_api.h"
#include "nccl_arithmetic.h"
#include "nccl_segment.h"

namespace fake {

// A reduction that a caller has made.
struct MadeReduction {
  bool live = false;
  ncclDataType_t dtype = ncclFloat32;
  Reduction reduction;
  // Where the scalar is read when the operation runs; 0 when it is in `reduction`.
  CUdeviceptr scalar = 0;
};

class Comm : public std::enable_shared_from_this<Comm> {
 public:
  using Job = std::function<ncclResult_t()>;

  Comm(int nranks, int rank, CUdevice device, bool blocking)
      : nranks(nranks), rank(rank), device(device), blocking(blocking) {}

  // Does the jobs, in order up to the first that fails, in a thread of their own.
  void start(std::vector<Job> jobs);
  // Blocks until they are done; the state then.
  ncclResult_t wait();
  ncclResult_t state();
  // Operations under way end early from now on.
  void abort() { aborted_ = true; }
  bool aborted() const { return aborted_; }

  // Joins the others, as a job.
  ncclResult_t join(const std::string& name, const GpuId& gpu);
  // Blocks until all operations so far have run; false when aborted.
  bool drain();

  const int nranks, rank;
  const CUdevice device;
  const bool blocking;

  // One operation uses it at a time: the one whose number is `finished`.
  Segment segment;
  // Operations given to streams, and those that have run.
  std::atomic<std::uint64_t> issued{0}, finished{0};
  std::atomic<bool> finalised{false};

  std::mutex lock;
  // By handle, from ncclNumOps; guarded by `lock`.
  std::vector<MadeReduction> reductions;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  ncclResult_t state_ = ncclSuccess;
  std::atomic<bool> aborted_{false};
};

Handles<Comm, ncclComm_t>& comms();

// Remembers the words, for ncclGetLastError, and returns the result.
ncclResult_t failed(ncclResult_t result, const std::string& words);
// The communicator of a handle, which must have no work in progress and no error.
ncclResult_t need_ready(ncclComm_t handle, std::shared_ptr<Comm>* comm);
// Does the job, or keeps it until the end of the calling thread's group. Returns what a call of NCCL returns.
ncclResult_t submit(const std::shared_ptr<Comm>& comm, Comm::Job job);

}  // namespace fake
