// ncclGroupStart, ncclGroupEnd, and `submit`, which a group defers.
//
// Thread rule: groups are thread-local.
#include <utility>

#include "nccl_comm.h"
#include "nccl_p2p.h"

namespace fake {
namespace {

struct Work {
  std::shared_ptr<Comm> comm;
  std::vector<Comm::Job> jobs;
  // Those of one of the jobs; null if there are none.
  std::shared_ptr<Messages> messages;
};

thread_local int depth = 0;
// By communicator, in the order of their first calls.
thread_local std::vector<Work> held_back;

// The work of a communicator in the thread's group.
Work& held(const std::shared_ptr<Comm>& comm) {
  for (Work& work : held_back) {
    if (work.comm == comm) return work;
  }
  held_back.push_back({comm, {}, nullptr});
  return held_back.back();
}

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
  if (depth == 0) return run({{comm, {std::move(job)}, nullptr}});
  held(comm).jobs.push_back(std::move(job));
  return ncclSuccess;
}

ncclResult_t submit_message(const std::shared_ptr<Comm>& comm, CUstream stream, const Message& message) {
  auto alone = std::make_shared<Messages>();
  alone->stream = stream;
  alone->list.push_back(message);
  if (depth == 0) return run({{comm, {messages_job(comm, alone)}, nullptr}});
  Work& work = held(comm);
  if (work.messages == nullptr) {
    work.messages = alone;
    work.jobs.push_back(messages_job(comm, alone));
  } else if (work.messages->stream != stream) {
    return failed(ncclInvalidUsage, "the fake has the messages of a group on one stream only");
  } else {
    work.messages->list.push_back(message);
  }
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
