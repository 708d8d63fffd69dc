// dl_comm's TensorFlow ops and their shape functions. kernels.cc has the kernels.
//
// One op takes all tensors of a step, or of a bucket. The ops are stateful, so TensorFlow does not prune, merge or fold
// them, and a tf.function runs them in program order.

#include "absl/status/status.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tf_ops/convert.h"

namespace dl_comm {
namespace {

// Each output has the shape of its input.
absl::Status same_shapes(tensorflow::shape_inference::InferenceContext* context) {
  for (int i = 0; i < context->num_inputs(); ++i) context->set_output(i, context->input(i));
  return absl::OkStatus();
}

absl::Status scalar_shape(tensorflow::shape_inference::InferenceContext* context) {
  context->set_output(0, context->Scalar());
  return absl::OkStatus();
}

REGISTER_OP("DlCommGradients")
    .Input("tensors: T")
    .Output("means: T")
    .Attr("T: list({half, bfloat16, float, double, int8, uint8, int32, int64}) >= 1")
    .Attr("settings: string")
    .SetIsStateful()
    .SetShapeFn(same_shapes)
    .Doc(R"doc(
The mean of every tensor over all ranks; a mean of integers rounds toward zero.

tensors: The tensors of this rank. Number, types and shapes must be the same on all ranks.
means: The means, in the order of `tensors`, the same on every rank.
settings: Text as in settings.h, with these numbers:
  team: The team that runs the call; -1 is the team of broadcast and barrier.
  towers: The number of replicas of a list that `tensors` contains, one after the other; the mean is also over these.
  owner: Distinguishes, on this rank only, equal lists of one name, for example of two optimizers.
  part: Whether the call belongs to the same step as the previous call, so that the schedule does not count it again.
  timed: Whether its duration counts as time that this rank waits for communication.
  caller_blocks: Whether the calling thread waits for the result anyway, so that it may run the call.
  timeout: The deadline in seconds; 0: no limit; negative: the team's.
)doc");

REGISTER_OP("DlCommBroadcast")
    .Input("tensors: T")
    .Output("values: T")
    .Attr("T: list({" DL_COMM_ALL_TYPES "}) >= 1")
    .Attr("settings: string")
    .SetIsStateful()
    .SetShapeFn(same_shapes)
    .Doc(R"doc(
The tensors of the rank `root`, on every rank.

tensors: The tensors of this rank. Number, types and shapes must be the same on all ranks.
values: The tensors of the root, in the order of `tensors`.
settings: Text as in settings.h, with these numbers:
  root: The rank that has the values.
  caller_blocks: As for DlCommGradients.
  timeout: The deadline in seconds; 0: no limit; negative: the team's.
)doc");

REGISTER_OP("DlCommCoreId").Output("core_id: int64").SetIsStateful().SetShapeFn(scalar_shape).Doc(R"doc(
The id of the dl_comm core, equal for all bindings in this process that share one core.
)doc");

}  // namespace
}  // namespace dl_comm
