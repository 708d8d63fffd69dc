// The collectives on groups: ops, shape functions and kernels. DlCommCollective has those whose results are like their
// inputs, DlCommBlockCollective those that join or cut tensors along the first axis; kernel.h says how they run.
//
// A rank without a result gets zeros (reduce) or a tensor without rows (gather).

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "dl_comm/codes.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tf_ops/kernel.h"

namespace dl_comm {
namespace {

using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

absl::Status like_inputs(InferenceContext* context) {
  for (int i = 0; i < context->num_outputs(); ++i) context->set_output(i, context->input(i));
  return absl::OkStatus();
}

// The rows of a result as far as they are known: they depend on the ranks, unless constant counts say them.
DimensionHandle rows_of_result(InferenceContext* context, int32_t collective, int index) {
  const int lists = collective == DL_COMM_ALLGATHER ? 1 : collective == DL_COMM_ALLTOALL ? 2 : 0;
  const int tensors = context->num_outputs();
  if (lists == 0 || context->num_inputs() != (1 + lists) * tensors) return context->UnknownDim();
  const Tensor* values = context->input_tensor(lists * tensors + index);
  if (values == nullptr) return context->UnknownDim();
  int64_t total = 0;
  for (int64_t i = 0; i < values->NumElements(); ++i) {
    const int64_t count = values->flat<int64_t>()(i);
    if (count < 0 || __builtin_add_overflow(total, count, &total)) return context->UnknownDim();
  }
  return context->MakeDim(total);
}

absl::Status like_inputs_but_rows(InferenceContext* context) {
  std::string text;
  absl::Status status = context->GetAttr("settings", &text);
  if (!status.ok()) return status;
  const int32_t collective = std::atoi(text.c_str());  // the first of the numbers
  const CollectiveKind* const kind = find_collective(collective);
  const bool joins = kind != nullptr && kind->joins();
  if (collective == DL_COMM_ALLTOALL && context->num_inputs() == context->num_outputs()) return like_inputs(context);
  for (int i = 0; i < context->num_outputs(); ++i) {
    ShapeHandle shape = context->input(i);
    if (context->RankKnown(shape)) {
      if (joins && context->Rank(shape) == 0) shape = context->Vector(1);
      status = context->WithRankAtLeast(shape, 1, &shape);
      if (status.ok()) status = context->ReplaceDim(shape, 0, rows_of_result(context, collective, i), &shape);
      if (!status.ok()) return status;
    }
    context->set_output(i, shape);
  }
  return absl::OkStatus();
}

absl::Status two_scalars(InferenceContext* context) {
  context->set_output(0, context->Scalar());
  context->set_output(1, context->Scalar());
  return absl::OkStatus();
}

REGISTER_OP("DlCommCollective")
    .Input("tensors: T")
    .Output("results: T")
    .Attr("T: list({" DL_COMM_ALL_TYPES "}) >= 0")
    .Attr("settings: string")
    .SetIsStateful()
    .SetShapeFn(like_inputs)
    .Doc(R"doc(
Allreduce, reduce or broadcast of a list of tensors, or a barrier, on a group of ranks.

tensors: The tensors of this rank; none for a barrier. Number, types and shapes must be the same on all ranks.
results: The results. Zeros on the other ranks than the root of a reduce.
settings: Text as in settings.h, with these numbers:
  collective: As in dl_comm.h.
  reduce: The operator, as in dl_comm.h.
  group: The number of the group in this process; 0 is the group of all ranks.
  root: The rank of the group that has the values, or gets the results.
  prescale: A factor of the inputs, of the operators DL_COMM_SCALED_....
  postscale: A factor of the result.
  flags: 1: as caller_blocks of DlCommGradients; 2: the call matches that of its name, wherever the ranks make it.
  timeout: The deadline in seconds; 0: no limit; negative: the group's.
)doc");

REGISTER_OP("DlCommBlockCollective")
    .Input("tensors: T")
    .Input("counts: N * int64")
    .Output("results: T")
    .Attr("T: list({" DL_COMM_ALL_TYPES "}) >= 1")
    .Attr("N: int >= 0")
    .Attr("settings: string")
    .SetIsStateful()
    .SetShapeFn(like_inputs_but_rows)
    .Doc(R"doc(
All-gather, gather, scatter, reduce-scatter or all-to-all of a list of tensors along their first axes.

tensors: The tensors of this rank. In a scatter, those of the root; the other ranks have tensors of the same shapes.
counts: Nothing for blocks of equal length. Otherwise for each tensor the extents of the blocks of all ranks; for an
  all-to-all for each tensor those that this rank sends, and then for each those that it receives.
results: The results. Tensors without rows on the other ranks than the root of a gather.
settings: Those of DlCommCollective.
)doc");

REGISTER_OP("DlCommGroup")
    .Output("rank: int64")
    .Output("size: int64")
    .Attr("group: int = 0")
    .SetIsStateful()
    .SetShapeFn(two_scalars)
    .Doc(R"doc(
This process's rank in a group, and the number of the group's ranks.

group: The number of the group in this process; 0 is the group of all ranks.
)doc");

struct GroupInfo {
  int64_t rank;
  int64_t size;
};

GroupInfo group_info(int64_t group) {
  const auto number = static_cast<std::uint64_t>(group);
  return {group_rank(number), group_size(number)};
}

// Nothing if there is no such group: the core then reports why when the call is submitted.
std::optional<GroupInfo> find_group(int64_t group) {
  try {
    return group_info(group);
  } catch (const rust::Error&) {
    return std::nullopt;
  }
}

// Runs a DlCommCollective.
class GroupKernel : public CollectiveKernel {
 public:
  explicit GroupKernel(OpKernelConstruction* context) : CollectiveKernel(context) {
    OP_REQUIRES_OK(context, read_settings(context, call_name_, labels_, collective_, reduce_, group_, root_, prescale_,
                                          postscale_, flags_, timeout_));
    caller_blocks_ = (flags_ & 1) != 0;
    by_name_ = (flags_ & 2) != 0;
  }

 protected:
  absl::Status prepare(OpKernelContext* context, bool on_host, ViewList& list,
                       std::vector<Tensor>& outputs) const override {
    if (collective_ != DL_COMM_REDUCE) return CollectiveKernel::prepare(context, on_host, list, outputs);
    const std::optional<GroupInfo> group = find_group(group_);
    if (!group) return absl::OkStatus();
    if (group->rank == root_) return CollectiveKernel::prepare(context, on_host, list, outputs);
    for (int i = 0; i < context->num_outputs(); ++i) {
      const Tensor& input = context->input(i);
      absl::Status status = new_result(context, on_host, input.dtype(), input.shape(), outputs[i]);
      if (!status.ok()) return status;
      status = fill_with_zeros(context, outputs[i]);
      if (!status.ok()) return status;
      add(list, input, outputs[i]);
    }
    return absl::OkStatus();
  }

  void submit(const DeviceStream& target, rust::Str instance, const ViewList& list,
              std::unique_ptr<Completion> completion, std::shared_ptr<ResultBuffer>) override {
    Collective call;
    call.options = options(target, call_name_, instance);
    call.group = static_cast<std::uint64_t>(group_);
    call.collective = collective_;
    call.reduce = reduce_;
    call.root = root_;
    call.prescale = prescale_;
    call.postscale = postscale_;
    call.by_name = by_name_;
    call.send_counts = list.send_counts();
    call.receive_counts = list.receive_counts();
    start_collective(call, list.views(), list.shapes(), std::move(completion));
  }

  int32_t flags_ = 0;
  int32_t collective_ = 0;
  int64_t group_ = 0;
  int32_t root_ = 0;

 private:
  int32_t reduce_ = 0;
  double prescale_ = 1;
  double postscale_ = 1;
};

// Runs a DlCommBlockCollective.
class BlockKernel : public GroupKernel {
 public:
  using GroupKernel::GroupKernel;

 protected:
  absl::Status prepare(OpKernelContext* context, bool on_host, ViewList& list,
                       std::vector<Tensor>& outputs) const override {
    const std::optional<GroupInfo> group = find_group(group_);
    const CollectiveKind* const kind = find_collective(collective_);
    if (!group || kind == nullptr) return absl::OkStatus();  // the core reports why when the call is submitted
    const auto counts = [context, &group](int index) {
      if (index >= context->num_inputs()) return Extents();
      const Tensor& given = context->input(index);
      const Extents values(given.flat<int64_t>().data(), static_cast<std::size_t>(given.NumElements()));
      if (given.dims() != 1)
        throw Error(DL_COMM_ERROR_INVALID, "invalid counts: ", values, " with ", given.dims(), " axes");
      sum_of_counts(values, group->size);  // refuses none, too
      return values;
    };
    const int count = context->num_outputs();
    const int lists = context->num_inputs() - count;
    if (lists != 0 && lists != (kind->exchanges() ? 2 : 1) * count)
      throw Error(DL_COMM_ERROR_INVALID, "there are ", lists, " lists of counts for ", count, " tensors");
    for (int i = 0; i < count; ++i) {
      const BlockCall blocks{*kind, group->rank, group->size, root_, counts(count + i), counts(2 * count + i)};
      blocks.check_counts(1);
      const Tensor& input = context->input(i);
      TensorShape shape = input.shape();
      const auto extents = shape.dim_sizes();
      const Rows rows = blocks.rows(extents, i);
      if (shape.dims() == 0) shape.AddDim(1);
      TensorShape block = shape;
      absl::Status status = shape.SetDimWithStatus(0, blocks.writes() ? rows.result : 0);
      if (status.ok()) status = block.SetDimWithStatus(0, rows.block);
      if (status.ok()) status = new_result(context, on_host, input.dtype(), shape, outputs[i]);
      if (!status.ok()) return status;
      add(list, input, outputs[i], block.dim_sizes());
      list.add_counts(blocks, extents);
    }
    return absl::OkStatus();
  }
};

class GroupInfoKernel final : public OpKernel {
 public:
  explicit GroupInfoKernel(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("group", &group_));
  }

  void Compute(OpKernelContext* context) override {
    Tensor* outputs[2] = {nullptr, nullptr};
    for (int i = 0; i < 2; ++i) OP_REQUIRES_OK(context, context->allocate_output(i, {}, &outputs[i]));
    try {
      const GroupInfo info = group_info(group_);
      outputs[0]->scalar<int64_t>()() = info.rank;
      outputs[1]->scalar<int64_t>()() = info.size;
    } catch (const rust::Error& error) {
      context->SetStatus(to_status(DL_COMM_ERROR_STATE, error.what()));
    }
  }

 private:
  int64_t group_ = 0;
};

REGISTER_KERNEL_BUILDER(Name("DlCommCollective").Device(tensorflow::DEVICE_CPU), GroupKernel);
REGISTER_KERNEL_BUILDER(Name("DlCommBlockCollective").Device(tensorflow::DEVICE_CPU), BlockKernel);
REGISTER_KERNEL_BUILDER(Name("DlCommGroup").Device(tensorflow::DEVICE_CPU), GroupInfoKernel);

#ifdef DL_COMM_TF_GPU
REGISTER_KERNEL_BUILDER(Name("DlCommCollective").Device(tensorflow::DEVICE_GPU), OnGpu<GroupKernel>);
REGISTER_KERNEL_BUILDER(Name("DlCommBlockCollective").Device(tensorflow::DEVICE_GPU).HostMemory("counts"),
                        OnGpu<BlockKernel>);
REGISTER_KERNEL_BUILDER(Name("DlCommGroup").Device(tensorflow::DEVICE_GPU).HostMemory("rank").HostMemory("size"),
                        GroupInfoKernel);
#endif

}  // namespace
}  // namespace dl_comm
