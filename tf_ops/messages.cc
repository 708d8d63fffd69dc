// Send and receive as one op, because a rank that does both at once must not wait for one before it starts the other.
//
// The kernel starts the transfers and returns; the one that ends last calls `done`, on the thread that completes it.
// The context keeps the tensors alive until then.

#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tf_ops/kernel.h"

namespace dl_comm {
namespace {

using tensorflow::Tensor;
using tensorflow::shape_inference::InferenceContext;

// The received tensors have the shapes of `like`; then come three scalars.
absl::Status like_and_scalars(InferenceContext* context) {
  const int received = context->num_outputs() - 3;
  const int sent = context->num_inputs() - received;
  for (int i = 0; i < received; ++i) context->set_output(i, context->input(sent + i));
  for (int i = received; i < received + 3; ++i) context->set_output(i, context->Scalar());
  return absl::OkStatus();
}

REGISTER_OP("DlCommMessage")
    .Input("sent: S")
    .Input("like: R")
    .Output("received: R")
    .Output("source_rank: int32")
    .Output("message_tag: int32")
    .Output("bytes: int64")
    .Attr("S: list({" DL_COMM_ALL_TYPES "}) >= 0")
    .Attr("R: list({" DL_COMM_ALL_TYPES "}) >= 0")
    .Attr("settings: string")
    .SetIsStateful()
    .SetShapeFn(like_and_scalars)
    .Doc(R"doc(
Sends a message to one rank of a group, receives one, or both at once.

sent: The tensors to send as one message; none: only receives.
like: The types and shapes of the tensors to receive; none: only sends. A shorter message leaves the rest of their values.
received: The received tensors.
source_rank: The rank that has sent them; -1 without a receive.
message_tag: The tag of the received message.
bytes: Its length.
settings: Text as in settings.h, with a name for error messages of this rank, and these numbers:
  destination: The rank to send to.
  send_tag: The tag of the sent message.
  source: The rank to receive from; -1: any.
  receive_tag: The tag to receive; -1: any.
  group: The number of the group in this process; 0 is the group of all ranks.
  timeout: The deadline in seconds; 0: no limit; negative: the group's.
)doc");

// One run of the kernel, shared by its transfers.
struct Exchange {
  OpKernelContext* context;
  AsyncOpKernel::DoneCallback done;
  std::vector<Tensor> received;
  int32_t source = -1;
  int32_t tag = -1;
  int64_t bytes = 0;
  std::mutex mutex;
  absl::Status status;
  int pending = 0;

  // Ends one transfer; the last one ends the run.
  void end(const absl::Status& ended) {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      status.Update(ended);
      if (--pending > 0) return;
    }
    context->SetStatus(status.ok() ? set_outputs() : status);
    done();
  }

  absl::Status set_outputs() {
    const int count = static_cast<int>(received.size());
    for (int i = 0; i < count; ++i) context->set_output(i, std::move(received[i]));
    Tensor* scalars[3] = {};
    for (int i = 0; i < 3; ++i) {
      const absl::Status allocated = context->allocate_output(count + i, {}, &scalars[i]);
      if (!allocated.ok()) return allocated;
    }
    scalars[0]->scalar<int32_t>()() = source;
    scalars[1]->scalar<int32_t>()() = tag;
    scalars[2]->scalar<int64_t>()() = bytes;
    return absl::OkStatus();
  }
};

// Ends a transfer.
class TransferCompletion final : public Completion {
 public:
  TransferCompletion(std::shared_ptr<Exchange> exchange, bool sends) : exchange_(std::move(exchange)), sends_(sends) {}

  void received(int32_t source, int32_t tag, std::size_t bytes) const noexcept override {
    if (sends_) return;
    exchange_->source = source;
    exchange_->tag = tag;
    exchange_->bytes = static_cast<int64_t>(bytes);
  }

  void done(int32_t code, rust::Str message, std::shared_ptr<ResultBuffer>) const noexcept override {
    exchange_->end(code == 0 ? absl::OkStatus() : to_status(code, absl::string_view(message.data(), message.size())));
  }

 private:
  std::shared_ptr<Exchange> exchange_;
  bool sends_;
};

class MessageKernel final : public AsyncOpKernel {
 public:
  explicit MessageKernel(OpKernelConstruction* context) : AsyncOpKernel(context) {
    std::string labels;  // none
    OP_REQUIRES_OK(context, read_settings(context, call_name_, labels, destination_, send_tag_, source_, receive_tag_,
                                          group_, timeout_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const int received = context->num_outputs() - 3;
    const int sent = context->num_inputs() - received;
    OP_REQUIRES_ASYNC(context, sent + received > 0,
                      to_status(DL_COMM_ERROR_INVALID, "a message needs at least one tensor"), done);
    auto exchange = std::make_shared<Exchange>();
    exchange->received.resize(received);
    ViewList sources(sent);
    ViewList destinations(received);
    const auto prepare = [&] {
      for (int i = 0; i < sent; ++i) add(sources, context->input(i), context->input(i));
      for (int i = 0; i < received; ++i) {
        const Tensor& like = context->input(sent + i);
        Tensor& output = exchange->received[i];
        const absl::Status allocated = context->allocate_temp(like.dtype(), like.shape(), &output);
        if (!allocated.ok()) return allocated;
        // A message may be shorter.
        if (like.TotalBytes() > 0) std::memcpy(output.data(), like.data(), like.TotalBytes());
        add(destinations, output, output);
      }
      return absl::OkStatus();
    };
    OP_REQUIRES_OK_ASYNC(context, status_of(prepare), done);
    exchange->context = context;
    exchange->done = std::move(done);
    exchange->pending = (sent > 0) + (received > 0);
    // `this` may be destroyed once the run has ended.
    const std::string name = call_name_;
    Transfer receive = transfer(false, source_, receive_tag_, name);
    Transfer send = transfer(true, destination_, send_tag_, name);
    if (received > 0) {
      start_transfer(receive, destinations.views(), std::make_unique<TransferCompletion>(exchange, false));
    }
    if (sent > 0) {
      start_transfer(send, sources.views(), std::make_unique<TransferCompletion>(exchange, true));
    }
  }

 private:
  Transfer transfer(bool sends, int32_t peer, int32_t tag, const std::string& name) const {
    Transfer call;
    call.group = static_cast<std::uint64_t>(group_);
    call.sends = sends;
    call.peer = peer;
    call.tag = tag;
    call.name = name;
    call.timeout = timeout_;
    call.device = -1;
    return call;
  }

  int32_t destination_ = 0;
  int32_t send_tag_ = 0;
  int32_t source_ = -1;
  int32_t receive_tag_ = -1;
  int64_t group_ = 0;
  double timeout_ = -1;
  std::string call_name_;
};

REGISTER_KERNEL_BUILDER(Name("DlCommMessage").Device(tensorflow::DEVICE_CPU), MessageKernel);

}  // namespace
}  // namespace dl_comm
