// The kernels of the ops of ops.cc, for tensors in host memory and, where TensorFlow's headers allow, in that of a GPU.
//
// The kernels are asynchronous: they hand the tensors to the core and return, so that no thread of TensorFlow waits for
// another rank. A thread of the team then writes the results and calls `done`. A step that TensorFlow cancels waits for
// its running calls, which end at the core's deadline at the latest: the peers still use the memory.
//
// On a GPU `done` comes when the results are there: a thread of the team looks for that, as TensorFlow's event manager
// would. A call begins after what is on TensorFlow's compute stream when it is made, and that stream does not wait for
// it: it goes on with the rest of backward. The context keeps inputs and results until `done`.

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tf_ops/convert.h"
#include "tf_ops/device_stream.h"

namespace dl_comm {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

// The memory of one run of a kernel.
class TensorResults final : public Results {
 public:
  std::size_t kind() const noexcept override {
    static const char mark = 0;  // one address for this library
    return reinterpret_cast<std::size_t>(&mark);
  }

  void settle(double, double) const noexcept override {}  // no call is separate

  std::shared_ptr<Results> blank(rust::Vec<std::size_t>& addresses) const noexcept override {
    auto fresh = std::make_shared<TensorResults>();
    for (const tensorflow::Tensor& output : outputs) {
      const tensorflow::Tensor zeros(output.dtype(), output.shape());
      if (!zeros.IsInitialized()) return nullptr;
      std::memset(zeros.data(), 0, zeros.TotalBytes());
      addresses.push_back(reinterpret_cast<std::size_t>(zeros.data()));
      fresh->outputs.push_back(zeros);
    }
    return fresh;
  }

  std::vector<tensorflow::Tensor> outputs;
};

// Ends one run of a kernel. The context is TensorFlow's until `done`.
class KernelCompletion final : public Completion {
 public:
  KernelCompletion(OpKernelContext* context, AsyncOpKernel::DoneCallback done, std::shared_ptr<TensorResults> own)
      : context_(context), done_(std::move(done)), own_(std::move(own)) {}

  void done(int32_t code, rust::Str message, std::shared_ptr<Results> results) const noexcept override {
    if (code != 0) {
      context_->SetStatus(to_status(code, absl::string_view(message.data(), message.size())));
    } else {
      // By `kind`, no other library's results come here. They are this call's alone now: TensorFlow gets the only
      // references, so that what comes next may work in place.
      TensorResults& have = results ? static_cast<TensorResults&>(*results) : *own_;
      for (int i = 0; i < context_->num_outputs(); ++i) context_->set_output(i, std::move(have.outputs[i]));
    }
    done_();
  }

 private:
  OpKernelContext* context_;
  AsyncOpKernel::DoneCallback done_;
  std::shared_ptr<TensorResults> own_;
};

// What a call in a loop adds to its name, nothing outside of loops. A session may run the iterations of one loop side
// by side, in another order on every rank, and their calls are alike otherwise. The iteration alone would not tell
// those of an inner loop apart: the number of a frame, a hash of the names of its loops and of the outer iterations,
// does.
std::string iteration(const tensorflow::FrameAndIter& frame_iter) {
  if (frame_iter.frame_id == 0 || frame_iter.frame_id == tensorflow::kIllegalFrameId) return {};
  return absl::StrCat(" [iteration ", frame_iter.iter_id, " of loop ", absl::Hex(frame_iter.frame_id), "]");
}

// What the average and the broadcast have in common: attributes, and the way from a context to a `TensorList`.
class CollectiveKernel : public AsyncOpKernel {
 public:
  explicit CollectiveKernel(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("call_name", &call_name_));
    OP_REQUIRES_OK(context, context->GetAttr("labels", &labels_));
    OP_REQUIRES_OK(context, context->GetAttr("timeout", &timeout_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) final {
    DeviceStream target;
    OP_REQUIRES_OK_ASYNC(context, device_stream(context, target), done);
    const bool on_host = target.device < 0;
    const int count = context->num_inputs();
    TensorList list(count);
    auto results = std::make_shared<TensorResults>();
    results->outputs.resize(count);
    // Not on a GPU, where the core refuses calls that return before they have ended.
    const bool copies = on_host && needs_copies();
    for (int i = 0; i < count; ++i) {
      const tensorflow::Tensor& input = context->input(i);
      tensorflow::Tensor& output = results->outputs[i];
      OP_REQUIRES_OK_ASYNC(context,
                           context->forward_input_or_allocate_temp({i}, input.dtype(), input.shape(),
                                                                   tensorflow::AllocatorAttributes(), &output),
                           done);
      if (copies && input.data() != output.data()) std::memcpy(output.data(), input.data(), input.TotalBytes());
      OP_REQUIRES_OK_ASYNC(context, list.add(copies ? output : input, output), done);
    }
    const std::string instance = iteration(context->frame_iter());
    auto completion = std::make_unique<KernelCompletion>(context, std::move(done), results);
    // The core mixes results of several calls in host memory only, and refuses calls of a GPU where it would have to.
    submit(target, {instance.data(), instance.size()}, list, std::move(completion),
           on_host ? std::move(results) : nullptr);
  }

 protected:
  // Sets `target` to where the tensors are, which is host memory as it comes.
  virtual absl::Status device_stream(OpKernelContext*, DeviceStream&) const { return absl::OkStatus(); }

  // Hands the call to the core, which copies the texts, and returns without waiting; afterwards `this` may be gone.
  virtual void submit(const DeviceStream& target, rust::Str instance, const TensorList& list,
                      std::unique_ptr<Completion> completion, std::shared_ptr<Results> results) = 0;

  // Whether the call may return before the inputs have been read: their memory may change then, that of reference
  // variables and of arrays that a session was fed with.
  virtual bool needs_copies() const { return false; }

  std::string call_name_;
  std::string labels_;
  float timeout_ = -1;
};

class GradientsKernel : public CollectiveKernel {
 public:
  explicit GradientsKernel(OpKernelConstruction* context) : CollectiveKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("team", &team_));
    OP_REQUIRES_OK(context, context->GetAttr("towers", &towers_));
    OP_REQUIRES_OK(context, context->GetAttr("owner", &owner_));
    OP_REQUIRES_OK(context, context->GetAttr("part", &part_));
    OP_REQUIRES_OK(context, context->GetAttr("timed", &timed_));
  }

 protected:
  bool needs_copies() const override { return carries(team_, static_cast<std::uint64_t>(owner_)); }

  void submit(const DeviceStream& target, rust::Str instance, const TensorList& list,
              std::unique_ptr<Completion> completion, std::shared_ptr<Results> results) override {
    Average call;
    call.team = team_;
    call.towers = static_cast<std::size_t>(towers_);
    call.name = {call_name_.data(), call_name_.size()};
    call.instance = instance;
    call.labels = {labels_.data(), labels_.size()};
    call.owner = static_cast<std::uint64_t>(owner_);
    call.part = part_;
    call.separate = false;
    call.timed = timed_;
    call.blocks = false;
    call.timeout = timeout_;
    call.device = target.device;
    call.stream = target.stream;
    call.waits = true;  // so that what follows on the stream, the rest of backward, goes on
    average(call, {list.views.data(), list.views.size()}, {list.shapes.data(), list.shapes.size()},
            std::move(completion), std::move(results));
  }

 private:
  int32_t team_ = 0;
  int32_t towers_ = 1;
  int64_t owner_ = 0;
  bool part_ = false;
  bool timed_ = true;
};

class BroadcastKernel : public CollectiveKernel {
 public:
  explicit BroadcastKernel(OpKernelConstruction* context) : CollectiveKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("root", &root_));
  }

 protected:
  void submit(const DeviceStream& target, rust::Str instance, const TensorList& list,
              std::unique_ptr<Completion> completion, std::shared_ptr<Results>) override {
    const std::string name = call_name_ + std::string(instance);
    Broadcast what;
    what.root = root_;
    what.name = {name.data(), name.size()};
    what.labels = {labels_.data(), labels_.size()};
    what.blocks = false;
    what.timeout = timeout_;
    what.device = target.device;
    what.stream = target.stream;
    what.waits = true;
    broadcast(what, {list.views.data(), list.views.size()}, {list.shapes.data(), list.shapes.size()},
              std::move(completion));
  }

 private:
  int32_t root_ = 0;
};

class CoreIdKernel final : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    tensorflow::Tensor* output = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &output));
    output->scalar<int64_t>()() = static_cast<int64_t>(core_id());
  }
};

REGISTER_KERNEL_BUILDER(Name("DlCommGradients").Device(tensorflow::DEVICE_CPU), GradientsKernel);
REGISTER_KERNEL_BUILDER(Name("DlCommBroadcast").Device(tensorflow::DEVICE_CPU), BroadcastKernel);
REGISTER_KERNEL_BUILDER(Name("DlCommCoreId").Device(tensorflow::DEVICE_CPU), CoreIdKernel);

#ifdef DL_COMM_TF_GPU
// A kernel for tensors in the memory of a GPU. It has no HostMemory arguments, for int32 neither, which TensorFlow's
// own kernels keep on the host: one list has tensors of all types, and TensorFlow brings each of them where a kernel
// wants it.
template <class Kernel>
class OnGpu final : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  absl::Status device_stream(OpKernelContext* context, DeviceStream& target) const override {
    return device_stream_of_kernel(context, target);
  }
};

REGISTER_KERNEL_BUILDER(Name("DlCommGradients").Device(tensorflow::DEVICE_GPU), OnGpu<GradientsKernel>);
REGISTER_KERNEL_BUILDER(Name("DlCommBroadcast").Device(tensorflow::DEVICE_GPU), OnGpu<BroadcastKernel>);
REGISTER_KERNEL_BUILDER(Name("DlCommCoreId").Device(tensorflow::DEVICE_GPU).HostMemory("core_id"), CoreIdKernel);
#endif

}  // namespace
}  // namespace dl_comm

// For callers without a TensorFlow session: the core's number.
extern "C" __attribute__((visibility("default"))) uintptr_t dl_comm_ops_core_id() { return dl_comm::core_id(); }

// And whether coming averages of an owner on a team may return before they have ended, which host memory alone allows.
extern "C" __attribute__((visibility("default"))) bool dl_comm_ops_may_return_early(int32_t team, uint64_t owner) {
  return dl_comm::carries(team, owner);
}
