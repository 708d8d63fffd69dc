// Sends and receives of the fake NCCL.
//
// The messages of a group on one communicator progress side by side, as NCCL documents it. Outside a group a message is
// a group of its own.
#pragma once

#include <memory>
#include <vector>

#include "nccl_comm.h"

namespace fake {

// A message of a group.
struct Message {
  bool sends = false;
  int peer = 0;
  CUdeviceptr memory = 0;
  MessageHeader header;
};

// The messages of one group, on one stream.
struct Messages {
  CUstream stream = nullptr;
  std::vector<Message> list;
};

// The job that enqueues messages on their stream; the list may grow until the job runs.
Comm::Job messages_job(const std::shared_ptr<Comm>& comm, const std::shared_ptr<Messages>& messages);

}  // namespace fake
