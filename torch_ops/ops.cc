// The ops torch.ops.dl_comm.* for training: allreduce (mean) and broadcast of lists of tensors, on the host or on a
// GPU; and the waits for started calls. collectives.cc has the other collectives.
//
// An op checks its tensors, passes them to the core and waits; average_start does not wait. On a GPU it waits until the
// core has enqueued its work: then torch's current stream waits for the result, the host does not. torch calls ops
// without the GIL, so waiting blocks no Python thread. Errors are RuntimeErrors "dl_comm error <code>: <message>";
// dl_comm.torch converts them to dl_comm.CommError and its subclasses. python/dl_comm/torch/_ops.py has the fake
// kernels and the gradient of `average`.
//
// Every kernel is registered for all devices, so that unsupported devices get our error message.
//
// Thread rule: any thread may call ops; calls of one team run in the order in which they were made.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "result_memory.h"
#include "tensor_views.h"
#include "unbox.h"
#include "work.h"

namespace dl_comm::torch_ops {
namespace {

using ::torch::stable::detail::from;
using ::torch::stable::detail::to;
using Tensors = std::vector<Tensor>;

// Flags of average_start.
constexpr int64_t kContinuesStep = 1;  // the call belongs to the same step as the previous call
constexpr int64_t kDonateTensors = 2;  // the caller gives up the tensors: the core may keep them past the call

// Describes an allreduce to the core. `call` must outlive the result, which points into it.
Average describe_call(const Arguments& call, DeviceStream target, std::size_t towers, uint64_t owner, bool part,
                      bool timed) {
  Average average;
  average.options = options_of(call.name, call.labels, timed, -1, target);
  average.team = call.number;
  average.towers = towers;
  average.owner = owner;
  average.continues_step = part;
  average.return_weights = !timed;
  average.count_wait = timed;
  return average;
}

std::shared_ptr<Work> start_average(const Average& call, const TensorViews& views, Tensors keep,
                                    std::shared_ptr<ResultBuffer> results, std::shared_ptr<CommTimer> timer = nullptr) {
  const int32_t wait_time_team = call.count_wait ? -1 : call.team;
  auto work = std::make_shared<Work>(std::move(keep), views.device_stream(), wait_time_team, std::move(timer));
  average(call, views.views(), views.shapes(), completion_of(work), std::move(results));
  return work;
}

TensorViews in_place(const Arguments& call) {
  TensorViews views(call.tensors.size(), call.labels);
  for (const Tensor& tensor : call.tensors) {
    views.check_dense(tensor);
    views.add(tensor);
  }
  return views;
}

void average_in_place(StableIValue* stack, uint64_t, uint64_t) {
  const Arguments call(stack);
  const TensorViews views = in_place(call);
  Average average = describe_call(call, views.device_stream(), 1, 0, false, true);
  average.options.timeout = to<double>(stack[4]);
  start_average(average, views, call.tensors, nullptr)->wait();
}

void broadcast_in_place(StableIValue* stack, uint64_t, uint64_t) {
  const Arguments call(stack);
  const TensorViews views = in_place(call);
  const auto work = std::make_shared<Work>(call.tensors, views.device_stream(), -1);
  const auto timeout = to<double>(stack[4]);
  const Options options = options_of(call.name, call.labels, true, timeout, views.device_stream());
  start_collective(broadcast_of(options, call.number), views.views(), views.shapes(), completion_of(work));
  work->wait();
}

void average_new(StableIValue* stack, uint64_t, uint64_t) {
  const Arguments call(stack);
  const auto towers = static_cast<std::size_t>(std::max<int64_t>(to<int64_t>(stack[4]), 0));
  // A call that may return before its allreduce ends needs copies: the caller may change its tensors meanwhile.
  const bool copies = may_return_early(call.number, 0);
  TensorViews views(call.tensors.size(), call.labels);
  Tensors keep;
  Tensors results;
  for (const Tensor& tensor : call.tensors) {
    views.check_dense(tensor);
    keep.push_back(tensor.is_contiguous() ? tensor : ::torch::stable::contiguous(tensor));
    results.push_back(new_result(tensor, extents_of(tensor)));
    if (copies) {
      ::torch::stable::copy_(results.back(), keep.back());
      views.add(results.back());
    } else {
      views.add(keep.back(), results.back());
    }
  }
  auto kept = copies ? std::make_shared<TensorResults>(results, views.device_stream()) : nullptr;
  Average average = describe_call(call, views.device_stream(), towers, 0, false, true);
  average.options.timeout = to<double>(stack[5]);
  const auto work = start_average(average, views, std::move(keep), std::move(kept));
  const Tensors returned = work->wait().tensors;
  stack[0] = from(returned.empty() ? results : returned);
}

void average_start(StableIValue* stack, uint64_t, uint64_t) {
  const Arguments call(stack);
  const auto flags = to<int64_t>(stack[4]);
  const auto owner = static_cast<uint64_t>(to<int64_t>(stack[5]));
  const TensorViews views = in_place(call);
  auto kept =
      (flags & kDonateTensors) != 0 ? std::make_shared<TensorResults>(call.tensors, views.device_stream()) : nullptr;
  const Average average = describe_call(call, views.device_stream(), 1, owner, (flags & kContinuesStep) != 0, false);
  stack[0] = from(register_work(start_average(average, views, call.tensors, std::move(kept), timer_of(owner))));
}

void wait_work(StableIValue* stack, uint64_t, uint64_t) {
  const Outcome outcome = take_work(to<int64_t>(stack[0]))->wait();
  stack[0] = from(outcome.tensors);
  stack[1] = from(outcome.own_share);
  stack[2] = from(outcome.share);
}

void test_work(StableIValue* stack, uint64_t, uint64_t) {
  const auto work = find_work(to<int64_t>(stack[0]));
  const bool ended = work->finished();
  if (ended) work->wait();
  stack[0] = from(ended);
}

void wait_for_work(StableIValue* stack, uint64_t, uint64_t) {
  const auto work = find_work(to<int64_t>(stack[0]));
  const bool ended = work->wait_for(to<double>(stack[1]));
  if (ended) work->wait();
  stack[0] = from(ended);
}

void discard_carried_means(StableIValue* stack, uint64_t, uint64_t) {
  discard_carried(take_number(stack[0]), static_cast<uint64_t>(to<int64_t>(stack[1])));
}

void query_may_return_early(StableIValue* stack, uint64_t, uint64_t) {
  stack[0] = from(may_return_early(take_number(stack[0]), static_cast<uint64_t>(to<int64_t>(stack[1]))));
}

void detach_call(StableIValue* stack, uint64_t, uint64_t) { detach_work(to<int64_t>(stack[0])); }

void comm_seconds(StableIValue* stack, uint64_t, uint64_t) {
  stack[0] = from(take_comm_seconds(static_cast<uint64_t>(to<int64_t>(stack[0]))));
}

void set_stream_function(StableIValue* stack, uint64_t, uint64_t) {
  set_stream_source(reinterpret_cast<StreamSource>(static_cast<std::uintptr_t>(to<int64_t>(stack[0]))));
}

void core_identity(StableIValue* stack, uint64_t, uint64_t) { stack[0] = from(static_cast<int64_t>(core_id())); }

}  // namespace
}  // namespace dl_comm::torch_ops

// For programs that load this library without Python.
extern "C" __attribute__((visibility("default"))) uintptr_t dl_comm_ops_core_id() { return dl_comm::core_id(); }

STABLE_TORCH_LIBRARY(dl_comm, library) {
  // In place, blocking: the mean over all ranks. `timeout`: seconds; 0: no limit; negative: the team's.
  library.def("average_(Tensor(a!)[] tensors, int team, str name, str labels, float timeout) -> ()");
  // As average_, into new contiguous tensors. `tensors` holds `towers` replicas of a list, one after the other.
  // Differentiable.
  // average_no_grad is the same without the gradient, which costs microseconds also where it is not used.
  library.def("average(Tensor[] tensors, int team, str name, str labels, int towers, float timeout) -> Tensor[]");
  library.def(
      "average_no_grad(Tensor[] tensors, int team, str name, str labels, int towers, float timeout) -> Tensor[]");
  // In place, blocking: copies the tensors of rank `root` to all ranks.
  library.def("broadcast_(Tensor(a!)[] tensors, int root, str name, str labels, float timeout) -> ()");
  // As average_, but returns at once with a number for `wait`; do not touch the tensors until then.
  // Flags: kContinuesStep, kDonateTensors.
  library.def("average_start(Tensor(a!)[] tensors, int team, str name, str labels, int flags, int owner) -> int");
  // Drops the means that earlier calls of `owner` carry over to later ones.
  library.def("discard_carried(int team, int owner) -> ()");
  // Blocks until the call completes; once per number. Returns (tensors, own_share, share): the result is
  // own_share * (the call's tensors) + share * tensors. Without kDonateTensors, `tensors` is empty and the result is in
  // the call's tensors.
  library.def("wait(int number) -> (Tensor[], float, float)");
  // For the numbers of the `*_start` ops, any number of times: whether the call has ended, now or within `seconds`
  // (0: no limit). Raises its error.
  library.def("test(int number) -> bool");
  library.def("wait_for(int number, float seconds) -> bool");
  // Whether later calls of `owner` on the team may return early, or return the mean of an earlier call.
  library.def("may_return_early(int team, int owner) -> bool");
  // Replaces `wait` for a caller that does not need the result.
  library.def("detach(int number) -> ()");
  // The seconds with calls of average_start of `owner` in flight, since the last query.
  library.def("comm_seconds(int owner) -> float");
  // Sets the function that returns torch's CUDA streams: dl_comm_current_stream of libdl_comm_torch_cuda.so.
  library.def("set_stream_source(int function) -> ()");
  // Identifies the core library in this process; equal for all bindings that share it.
  library.def("core_id() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(dl_comm, CompositeExplicitAutograd, library) {
  using namespace dl_comm::torch_ops;
  library.impl("average_", &average_in_place);
  library.impl("average", &average_new);
  library.impl("average_no_grad", &average_new);
  library.impl("broadcast_", &broadcast_in_place);
  library.impl("average_start", &average_start);
  library.impl("wait", &wait_work);
  library.impl("test", &test_work);
  library.impl("wait_for", &wait_for_work);
  library.impl("detach", &detach_call);
  library.impl("may_return_early", &query_may_return_early);
  library.impl("discard_carried", &discard_carried_means);
  library.impl("comm_seconds", &comm_seconds);
  library.impl("set_stream_source", &set_stream_function);
  library.impl("core_id", &core_identity);
}
