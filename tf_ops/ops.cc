// The ops that dl_comm adds to TensorFlow, and their shape functions. Their kernels are in kernels.cc.
//
// One op takes all tensors of a step, or of a part of it. The ops are stateful, so that TensorFlow neither prunes,
// merges nor folds them, and inside a tf.function runs them in the order of the program.

#include "absl/status/status.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace dl_comm {
namespace {

// Every result has the shape of its input.
absl::Status same_shapes(tensorflow::shape_inference::InferenceContext* context) {
  for (int i = 0; i < context->num_inputs(); ++i) context->set_output(i, context->input(i));
  return absl::OkStatus();
}

absl::Status scalar_shape(tensorflow::shape_inference::InferenceContext* context) {
  context->set_output(0, context->Scalar());
  return absl::OkStatus();
}

// An attribute called `name` would clash with the name of the node, hence `call_name`.
REGISTER_OP("DlCommGradients")
    .Input("tensors: T")
    .Output("means: T")
    .Attr("T: list({half, bfloat16, float, double, int8, uint8, int32, int64}) >= 1")
    .Attr("team: int")
    .Attr("towers: int >= 1 = 1")
    .Attr("owner: int = 0")
    .Attr("part: bool = false")
    .Attr("timed: bool = true")
    .Attr("timeout: float = -1")
    .Attr("call_name: string")
    .Attr("labels: string = ''")
    .SetIsStateful()
    .SetShapeFn(same_shapes)
    .Doc(R"doc(
The mean of every tensor over all ranks; a mean of integers rounds toward zero.

tensors: The tensors of this rank. All ranks give the same number, types and shapes.
means: The means, in the order of `tensors`, the same on every rank.
team: The thread team that does the work; -1 is the team of broadcast and barrier.
towers: How many replicas of a list, one after the other, `tensors` are; the mean is over these too.
owner: Tells apart, on this rank only, equal lists of one `call_name`, of two optimizers say.
part: Whether it is a further part of the step that the call before belongs to, which the team's schedule has counted.
timed: Whether the time that it takes counts as time that this rank waits for communication.
timeout: The longest that the op may take, in seconds: 0 for no limit, negative for that of the team.
call_name: What the ranks must agree on besides types and shapes.
labels: The names of the tensors, one a line, for error messages.
)doc");

REGISTER_OP("DlCommBroadcast")
    .Input("tensors: T")
    .Output("values: T")
    .Attr("T: list({half, bfloat16, float, double, int8, uint8, int32, int64, bool}) >= 1")
    .Attr("root: int")
    .Attr("timeout: float = -1")
    .Attr("call_name: string")
    .Attr("labels: string = ''")
    .SetIsStateful()
    .SetShapeFn(same_shapes)
    .Doc(R"doc(
The tensors of the rank `root`, on every rank.

tensors: The tensors of this rank. All ranks give the same number, types and shapes.
values: The tensors of the root, in the order of `tensors`.
root: The rank whose tensors count.
timeout: The longest that the op may take, in seconds: 0 for no limit, negative for that of the team.
call_name: What the ranks must agree on besides types and shapes.
labels: The names of the tensors, one a line, for error messages.
)doc");

REGISTER_OP("DlCommCoreId").Output("core_id: int64").SetIsStateful().SetShapeFn(scalar_shape).Doc(R"doc(
A number that is the same for all who share one dl_comm core in this process.
)doc");

}  // namespace
}  // namespace dl_comm
