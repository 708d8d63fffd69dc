// The ops torch.ops.dl_comm.*: averages and broadcasts of lists of CPU tensors.
//
// An op checks its tensors, hands them to the core and waits (average_start does not). torch calls ops without the GIL,
// so waiting stops no Python thread. Errors are RuntimeErrors with the text "dl_comm error <code>: <message>", which
// dl_comm.torch turns into dl_comm.CommError and its subclasses. The fake kernels and the gradient of `average` are in
// python/dl_comm/torch/_ops.py.
//
// Every kernel is registered for all devices, so that a tensor that is not on the CPU gets our own words.
//
// Thread rule: ops may be called from any thread; calls of one team run in the order in which they were made.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <memory>
#include <utility>

#include "tickets.h"
#include "unbox.h"
#include "views.h"

namespace dl_comm::torch_ops {
namespace {

using ::torch::stable::detail::from;
using ::torch::stable::detail::to;
using Tensors = std::vector<Tensor>;

enum class Operation { kAverage, kBroadcast };

std::shared_ptr<Ticket> submit(Operation operation, const Arguments& call, const Views& views, Tensors keep) {
  auto ticket = std::make_shared<Ticket>(std::move(keep));
  const auto start = operation == Operation::kAverage ? &average : &broadcast;
  start(call.number, call.name, call.labels, views.tensors(), views.shapes(), completion_of(ticket));
  return ticket;
}

std::shared_ptr<Ticket> submit_in_place(Operation operation, Arguments call) {
  Views views(call.tensors.size(), call.labels);
  for (const Tensor& tensor : call.tensors) {
    views.expect_dense(tensor);
    views.add(tensor);
  }
  Tensors keep = std::move(call.tensors);
  return submit(operation, call, views, std::move(keep));
}

void average_in_place(StableIValue* stack, uint64_t, uint64_t) {
  submit_in_place(Operation::kAverage, Arguments(stack))->wait();
}

void broadcast_in_place(StableIValue* stack, uint64_t, uint64_t) {
  submit_in_place(Operation::kBroadcast, Arguments(stack))->wait();
}

void average_new(StableIValue* stack, uint64_t, uint64_t) {
  const Arguments call(stack);
  Views views(call.tensors.size(), call.labels);
  Tensors keep;
  Tensors results;
  for (const Tensor& tensor : call.tensors) {
    views.expect_dense(tensor);
    keep.push_back(tensor.is_contiguous() ? tensor : ::torch::stable::contiguous(tensor));
    results.push_back(::torch::stable::empty_like(keep.back()));
    views.add(keep.back(), results.back());
  }
  submit(Operation::kAverage, call, views, std::move(keep))->wait();
  stack[0] = from(results);
}

void average_start(StableIValue* stack, uint64_t, uint64_t) {
  stack[0] = from(enroll(submit_in_place(Operation::kAverage, Arguments(stack))));
}

void wait_for(StableIValue* stack, uint64_t, uint64_t) { withdraw(to<int64_t>(stack[0]))->wait(); }

void forget_call(StableIValue* stack, uint64_t, uint64_t) { forget(to<int64_t>(stack[0])); }

void identity_of_core(StableIValue* stack, uint64_t, uint64_t) { stack[0] = from(static_cast<int64_t>(core_id())); }

}  // namespace
}  // namespace dl_comm::torch_ops

// For programs that load this library without Python.
extern "C" __attribute__((visibility("default"))) uintptr_t dl_comm_ops_core_id() { return dl_comm::core_id(); }

STABLE_TORCH_LIBRARY(dl_comm, library) {
  // In place, blocking: the mean over all ranks.
  library.def("average_(Tensor(a!)[] tensors, int team, str name, str labels) -> ()");
  // The same into new, contiguous tensors. Differentiable.
  library.def("average(Tensor[] tensors, int team, str name, str labels) -> Tensor[]");
  // In place, blocking: the tensors of rank `root`.
  library.def("broadcast_(Tensor(a!)[] tensors, int root, str name, str labels) -> ()");
  // As average_, but returns at once with a number for `wait`; until then the tensors must be left alone.
  library.def("average_start(Tensor(a!)[] tensors, int team, str name, str labels) -> int");
  // Blocks until the call has ended; once for each number.
  library.def("wait(int number) -> ()");
  // In place of `wait`, when nobody will read the result.
  library.def("forget(int number) -> ()");
  // The same number for all who share one core in this process.
  library.def("core_id() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(dl_comm, CompositeExplicitAutograd, library) {
  using namespace dl_comm::torch_ops;
  library.impl("average_", &average_in_place);
  library.impl("average", &average_new);
  library.impl("broadcast_", &broadcast_in_place);
  library.impl("average_start", &average_start);
  library.impl("wait", &wait_for);
  library.impl("forget", &forget_call);
  library.impl("core_id", &identity_of_core);
}
