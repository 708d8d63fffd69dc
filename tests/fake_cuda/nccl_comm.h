// Communicators of the fake NCCL: state and background work.
//
// As in NCCL, a call on a non-blocking communicator returns at once and a separate thread does the work. Meanwhile the
// state is ncclInProgress, and other calls fail.
//
// Thread rule: any thread.
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

// A user-defined reduction.
struct UserReduction {
  bool live = false;
  ncclDataType_t dtype = ncclFloat32;
  Reduction reduction;
  // Device address of the scalar, read when the operation runs; 0 if `reduction` holds it.
  CUdeviceptr scalar = 0;
};

class Comm : public std::enable_shared_from_this<Comm> {
 public:
  using Job = std::function<ncclResult_t()>;

  Comm(int nranks, int rank, CUdevice device, bool blocking)
      : nranks(nranks), rank(rank), device(device), blocking(blocking) {}

  // Runs the jobs in order on a new thread, up to the first failure.
  void start(std::vector<Job> jobs);
  // Blocks until the jobs have finished; returns the state.
  ncclResult_t wait();
  ncclResult_t state();
  // Makes operations in progress end early.
  void abort() { aborted_ = true; }
  bool aborted() const { return aborted_; }

  // Joins the other ranks; runs as a job.
  ncclResult_t join(const std::string& name, const GpuId& gpu);
  // Blocks until all operations so far have run; false if aborted.
  bool drain();

  const int nranks, rank;
  const CUdevice device;
  const bool blocking;

  // Used by one operation at a time: that with number `finished`.
  Segment segment;
  // Numbers of operations enqueued on streams, and of those that have run. Ranks differ in them, since not all take
  // part in all messages.
  std::atomic<std::uint64_t> issued{0}, finished{0};
  // The number of collective operations, the same on all ranks.
  std::atomic<std::uint64_t> collectives{0};
  std::atomic<bool> finalised{false};

  std::mutex lock;
  // By handle minus ncclNumOps; guarded by `lock`.
  std::vector<UserReduction> reductions;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  ncclResult_t state_ = ncclSuccess;
  std::atomic<bool> aborted_{false};
};

Handles<Comm, ncclComm_t>& comms();

// The reduction of an operator; fails if the communicator has none for the type.
ncclResult_t find_reduction(Comm& comm, ncclRedOp_t op, ncclDataType_t dtype, UserReduction* how);

struct Message;

// Stores the message for ncclGetLastError and returns `result`.
ncclResult_t failed(ncclResult_t result, const std::string& message);
// The communicator of a handle; fails while it has work in progress, or after an error.
ncclResult_t need_ready(ncclComm_t handle, std::shared_ptr<Comm>* comm);
// Runs the job, or defers it to the end of the thread's group. Returns the result of the NCCL call.
ncclResult_t submit(const std::shared_ptr<Comm>& comm, Comm::Job job);
// As `submit`, for a message, which joins the others of the group. Messages of a group are on one stream.
ncclResult_t submit_message(const std::shared_ptr<Comm>& comm, CUstream stream, const Message& message);

}  // namespace fake
