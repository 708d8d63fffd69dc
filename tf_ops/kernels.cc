// The kernels of the ops in ops.cc, for tensors in host memory and, if TensorFlow's headers allow it, on a GPU;
// kernel.h says how they run.

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "tf_ops/kernel.h"

namespace dl_comm {
namespace {

class GradientsKernel : public CollectiveKernel {
 public:
  explicit GradientsKernel(OpKernelConstruction* context) : CollectiveKernel(context) {
    OP_REQUIRES_OK(context, read_settings(context, call_name_, labels_, team_, towers_, owner_, part_, timed_,
                                          caller_blocks_, timeout_));
  }

 protected:
  bool needs_copies() const override { return may_return_early(team_, static_cast<std::uint64_t>(owner_)); }

  void submit(const DeviceStream& target, rust::Str instance, const ViewList& list,
              std::unique_ptr<Completion> completion, std::shared_ptr<ResultBuffer> results) override {
    Average call;
    call.options = options(target, call_name_, instance);
    call.team = team_;
    call.towers = static_cast<std::size_t>(towers_);
    call.owner = static_cast<std::uint64_t>(owner_);
    call.continues_step = part_;
    call.return_weights = false;
    call.count_wait = timed_;
    average(call, list.views(), list.shapes(), std::move(completion), std::move(results));
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
    OP_REQUIRES_OK(context, read_settings(context, call_name_, labels_, root_, caller_blocks_, timeout_));
  }

 protected:
  void submit(const DeviceStream& target, rust::Str instance, const ViewList& list,
              std::unique_ptr<Completion> completion, std::shared_ptr<ResultBuffer>) override {
    const std::string name = call_name_ + std::string(instance);
    start_collective(broadcast_of(options(target, name, {}), root_), list.views(), list.shapes(),
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
REGISTER_KERNEL_BUILDER(Name("DlCommGradients").Device(tensorflow::DEVICE_GPU), OnGpu<GradientsKernel>);
REGISTER_KERNEL_BUILDER(Name("DlCommBroadcast").Device(tensorflow::DEVICE_GPU), OnGpu<BroadcastKernel>);
REGISTER_KERNEL_BUILDER(Name("DlCommCoreId").Device(tensorflow::DEVICE_GPU).HostMemory("core_id"), CoreIdKernel);
#endif

}  // namespace
}  // namespace dl_comm

// Returns the id of the core, for callers without a TensorFlow session.
extern "C" __attribute__((visibility("default"))) uintptr_t dl_comm_ops_core_id() { return dl_comm::core_id(); }

// Whether later calls of an owner on a team may return early, which the core supports in host memory only.
extern "C" __attribute__((visibility("default"))) bool dl_comm_ops_may_return_early(int32_t team, uint64_t owner) {
  return dl_comm::may_return_early(team, owner);
}
