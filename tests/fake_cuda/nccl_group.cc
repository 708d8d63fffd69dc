// ncclGroupStart, ncclGroupEnd, and `submit`, which a group defers.
//
// Thread rule: groups are thread-local.
#include <utility>

#include "nccl_comm.h"

namespace fake {
namespace {

struct Work {
  std::shared_ptr<Comm> comm;
  std::vector<Comm::Job> jobs;
};

thread_local int depth = 0;
// By communicator, in the order of their first calls.
thread_local std::vector<Work> held_back;

// Starts the work of all communicators before waiting for any, because they may depend on each other.
ncclResult_t run(const std::vector<Work>& all) {
  for (const Work& work : all) work.comm->start(work.jobs);
  ncclResult_t result = ncclSuccess;
  for (const Work& work : all) {
    const ncclResult_t own = work.comm->blocking ? work.comm->wait() : ncclInProgress;
    if (result == ncclSuccess || (result == ncclInProgress && own != ncclSuccess)) result = own;
  }
  return result;
}

}  // namespace

ncclResult_t submit(const std::shared_ptr<Comm>& comm, Comm::Job job) {
  if (depth == 0) return run({{comm, {std::move(job)}}});
  for (Work& work : held_back) {
    if (work.comm != comm) continue;
    work.jobs.push_back(std::move(job));
    return ncclSuccess;
  }
  held_back.push_back({comm, {std::move(job)}});
  return ncclSuccess;
}

}  // namespace fake

using namespace fake;

FAKE_API ncclResult_t ncclGroupStart() {
  ++depth;
  return ncclSuccess;
}

FAKE_API ncclResult_t ncclGroupEnd() {
  if (depth == 0) return failed(ncclInvalidUsage, "ncclGroupEnd: not in a group");
  if (--depth > 0) return ncclSuccess;
  return run(std::exchange(held_back, {}));
}
