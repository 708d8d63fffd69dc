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
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dl_comm.h"
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

// The rows of the results as far as they are known: they depend on the ranks, unless constant counts say them.
DimensionHandle rows_of_results(InferenceContext* context, int32_t collective) {
  const bool exchanges = collective == DL_COMM_ALLTOALL;
  const int counts = context->num_inputs() - 1;
  if ((collective != DL_COMM_ALLGATHER && !exchanges) || counts < context->num_outputs()) return context->UnknownDim();
  const Tensor* values = context->input_tensor(counts);
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
  const bool joins = collective == DL_COMM_ALLGATHER || collective == DL_COMM_GATHER;
  if (collective == DL_COMM_ALLTOALL && context->num_inputs() == context->num_outputs()) return like_inputs(context);
  for (int i = 0; i < context->num_outputs(); ++i) {
    ShapeHandle shape = context->input(i);
    if (context->RankKnown(shape)) {
      if (joins && context->Rank(shape) == 0) shape = context->Vector(1);
      status = context->WithRankAtLeast(shape, 1, &shape);
      if (status.ok()) status = context->ReplaceDim(shape, 0, rows_of_results(context, collective), &shape);
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
  prescale: A factor of the inputs, of the operator DL_COMM_SCALED_SUM.
  postscale: A factor of the sum.
  caller_blocks: As for DlCommGradients.
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
counts: Nothing for blocks of equal length. Otherwise there is one tensor, and the extents of the blocks of all ranks;
  for an all-to-all those that this rank sends, and those that it receives.
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

absl::Status invalid(absl::string_view message) { return to_status(DL_COMM_ERROR_INVALID, message); }

// Runs a DlCommCollective.
class GroupKernel : public CollectiveKernel {
 public:
  explicit GroupKernel(OpKernelConstruction* context) : CollectiveKernel(context) {
    OP_REQUIRES_OK(context, read_settings(context, call_name_, labels_, collective_, reduce_, group_, root_, prescale_,
                                          postscale_, caller_blocks_, timeout_));
  }

 protected:
  absl::Status prepare(OpKernelContext* context, bool on_host, TensorList& list,
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
      if (status.ok()) status = list.add(input, outputs[i]);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  void submit(const DeviceStream& target, rust::Str instance, const TensorList& list,
              std::unique_ptr<Completion> completion, std::shared_ptr<ResultBuffer>) override {
    Collective call;
    call.group = static_cast<std::uint64_t>(group_);
    call.collective = collective_;
    call.reduce = reduce_;
    call.root = root_;
    call.prescale = prescale_;
    call.postscale = postscale_;
    call.send_counts = {list.send_counts.data(), list.send_counts.size()};
    call.receive_counts = {list.receive_counts.data(), list.receive_counts.size()};
    call.name = {call_name_.data(), call_name_.size()};
    call.instance_id = instance;
    call.tensor_names = {labels_.data(), labels_.size()};
    call.caller_blocks = caller_blocks_ && target.device < 0;
    call.timeout = timeout_;
    call.device = target.device;
    call.stream = target.stream;
    call.block_host = true;
    start_collective(call, {list.views.data(), list.views.size()}, {list.shapes.data(), list.shapes.size()},
                     std::move(completion));
  }

  int32_t collective_ = 0;
  int64_t group_ = 0;
  int32_t root_ = 0;

 private:
  int32_t reduce_ = 0;
  double prescale_ = 1;
  double postscale_ = 1;
  bool caller_blocks_ = false;
};

// The rows of a result, and of what a rank contributes or receives.
struct Rows {
  int64_t written = 0;
  int64_t block = 0;
};

// Runs a DlCommBlockCollective.
class BlockKernel : public GroupKernel {
 public:
  using GroupKernel::GroupKernel;

 protected:
  absl::Status prepare(OpKernelContext* context, bool on_host, TensorList& list,
                       std::vector<Tensor>& outputs) const override {
    const std::optional<GroupInfo> group = find_group(group_);
    if (!group) return absl::OkStatus();
    std::vector<std::vector<int64_t>> counts;
    for (int i = context->num_outputs(); i < context->num_inputs(); ++i) {
      const Tensor& given = context->input(i);
      if (given.dims() != 1 || given.NumElements() != group->size) {
        return invalid(absl::StrCat("counts of the shape ", given.shape().DebugString(), " (expected ", group->size,
                                    " extents, one for each rank)"));
      }
      const auto values = given.vec<int64_t>();
      counts.emplace_back(values.data(), values.data() + group->size);
    }
    if (!counts.empty() && context->num_outputs() != 1) {
      return invalid(absl::StrCat("blocks of different lengths need one tensor, not ", context->num_outputs()));
    }
    for (int i = 0; i < context->num_outputs(); ++i) {
      const Tensor& input = context->input(i);
      TensorShape shape = input.shape();
      if (shape.dims() == 0 && joins()) shape.AddDim(1);
      Rows rows;
      absl::Status status = rows_of(shape, i, *group, counts, rows);
      if (!status.ok()) return status;
      TensorShape result = shape;
      status = result.SetDimWithStatus(0, rows.written);
      if (status.ok()) status = new_result(context, on_host, input.dtype(), result, outputs[i]);
      TensorShape block = shape;
      if (status.ok()) status = block.SetDimWithStatus(0, rows.block);
      if (status.ok()) status = list.add(input, outputs[i], block);
      if (!status.ok()) return status;
      shape.RemoveDim(0);
      for (std::size_t which = 0; which < counts.size(); ++which) {
        std::vector<size_t>& elements = which == 0 ? list.send_counts : list.receive_counts;
        for (const int64_t count : counts[which]) elements.push_back(static_cast<size_t>(count * shape.num_elements()));
      }
    }
    return absl::OkStatus();
  }

 private:
  // Whether the blocks of all ranks are joined, instead of a tensor being cut.
  bool joins() const { return collective_ == DL_COMM_ALLGATHER || collective_ == DL_COMM_GATHER; }

  absl::Status rows_of(const TensorShape& shape, int index, const GroupInfo& group,
                       const std::vector<std::vector<int64_t>>& counts, Rows& rows) const {
    std::vector<int64_t> totals;
    for (const std::vector<int64_t>& list : counts) {
      int64_t total = 0;
      for (const int64_t count : list) {
        if (count < 0 || __builtin_add_overflow(total, count, &total)) {
          return invalid(absl::StrCat("invalid counts: ", absl::StrJoin(list, ", ")));
        }
      }
      totals.push_back(total);
    }
    if (shape.dims() == 0) return invalid(absl::StrCat("tensor ", index, " is a scalar; it has no first axis to cut"));
    const int64_t given = shape.dim_size(0);
    const auto mismatch = [&](int64_t wanted) {
      return invalid(absl::StrCat("tensor ", index, " has the shape ", shape.DebugString(), "; the counts ask for ",
                                  wanted, " rows"));
    };
    const bool is_root = group.rank == root_;
    if (joins()) {
      if (!counts.empty() && counts[0][group.rank] != given) return mismatch(counts[0][group.rank]);
      rows.block = given;
      rows.written = counts.empty() ? given * group.size : totals[0];
      if (collective_ == DL_COMM_GATHER && !is_root) rows.written = 0;
      return absl::OkStatus();
    }
    if (counts.empty() && given % group.size != 0) {
      return invalid(absl::StrCat("tensor ", index, " has the shape ", shape.DebugString(),
                                  "; its first axis must be a multiple of the ", group.size, " ranks"));
    }
    const bool reads = collective_ != DL_COMM_SCATTER || is_root;
    if (!counts.empty() && reads && given != totals[0]) return mismatch(totals[0]);
    rows.block = counts.empty() ? given / group.size : counts[0][group.rank];
    rows.written = rows.block;
    if (collective_ == DL_COMM_ALLTOALL) rows.written = counts.empty() ? given : totals[1];
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
