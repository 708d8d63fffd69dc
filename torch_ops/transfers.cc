// Send and receive as ops torch.ops.dl_comm.send_start and recv_start. Both return a number for `test`, `wait_for`,
// `status` and `detach`. A list of tensors is one message.
//
// Thread rule: any thread may call ops.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tensor_views.h"
#include "unbox.h"
#include "work.h"

namespace dl_comm::torch_ops {
namespace {

using ::torch::stable::detail::from;
using ::torch::stable::detail::to;
using Tensors = std::vector<Tensor>;

template <bool kSends>
void start(StableIValue* stack, uint64_t, uint64_t) {
  const auto tensors = to<Tensors>(stack[0]);
  const auto group = static_cast<uint64_t>(to<int64_t>(stack[1]));
  const std::string name = take_string(stack[4]);
  Transfer transfer;
  transfer.group = group;
  transfer.sends = kSends;
  transfer.peer = take_number(stack[2]);
  transfer.tag = take_number(stack[3]);
  transfer.name = name;
  transfer.timeout = to<double>(stack[5]);
  TensorViews views(tensors.size());
  Tensors keep;
  for (const Tensor& tensor : tensors) {
    views.check_dense(tensor);
    keep.push_back(kSends && !tensor.is_contiguous() ? ::torch::stable::contiguous(tensor) : tensor);
    if (!keep.back().is_contiguous())
      throw Error(DL_COMM_ERROR_INVALID, "out is not contiguous: receive into a contiguous tensor");
    void* const data = keep.back().mutable_data_ptr();
    views.add_block(tensor, data, data, extents_of(tensor));
  }
  transfer.device = views.device_stream().device;
  transfer.stream = views.device_stream().stream;
  const auto work = std::make_shared<Work>(std::move(keep), views.device_stream(), -1);
  start_transfer(transfer, views.views(), completion_of(work));
  stack[0] = from(register_work(work));
}

void status(StableIValue* stack, uint64_t, uint64_t) {
  const Status status = find_work(to<int64_t>(stack[0]))->status();
  stack[0] = from(static_cast<int64_t>(status.source));
  stack[1] = from(static_cast<int64_t>(status.tag));
  stack[2] = from(static_cast<int64_t>(status.bytes));
}

}  // namespace
}  // namespace dl_comm::torch_ops

STABLE_TORCH_LIBRARY_FRAGMENT(dl_comm, library) {
  // Sends `tensors` to rank `peer` of a group, or receives a message from it; -1: any rank, any tag.
  library.def("send_start(Tensor[] tensors, int group, int peer, int tag, str name, float timeout) -> int");
  library.def("recv_start(Tensor(a!)[] tensors, int group, int peer, int tag, str name, float timeout) -> int");
  // Source, tag and bytes of a receive that has ended.
  library.def("status(int number) -> (int, int, int)");
}

STABLE_TORCH_LIBRARY_IMPL(dl_comm, CompositeExplicitAutograd, library) {
  using namespace dl_comm::torch_ops;
  library.impl("send_start", &start<true>);
  library.impl("recv_start", &start<false>);
  library.impl("status", &status);
}
