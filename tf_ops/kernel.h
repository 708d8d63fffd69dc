// What the kernels of kernels.cc and collectives.cc have in common.
//
// The kernels are asynchronous: they pass the tensors to the core and return, so no TensorFlow thread waits for another
// rank. A thread of the team then writes the results and calls `done`. A cancelled step waits for its running calls,
// which end at the core's deadline at the latest: peers still use the memory.
//
// On a GPU a thread of the team polls for the results and then calls `done`, as TensorFlow's event manager would. A
// call starts after the work that is on TensorFlow's compute stream when the kernel runs. That stream does not wait for
// the call: it continues with the rest of backward. The context keeps inputs and results alive until `done`.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "dl_comm.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tf_ops/convert.h"
#include "tf_ops/device_stream.h"
#include "tf_ops/settings.h"

namespace dl_comm {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

// The result memory of one kernel run.
class TensorResults final : public ResultBuffer {
 public:
  void set_weights(double, double) const noexcept override {
  }  // only for separate calls, which these kernels do not make

  std::shared_ptr<ResultBuffer> zeros_like(rust::Vec<std::size_t>& addresses) const noexcept override {
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

// Completes one kernel run. The context is valid until `done`.
class KernelCompletion final : public Completion {
 public:
  KernelCompletion(OpKernelContext* context, AsyncOpKernel::DoneCallback done, std::shared_ptr<TensorResults> own,
                   bool by_name)
      : context_(context), done_(std::move(done)), own_(std::move(own)), by_name_(by_name) {}

  void done(int32_t code, rust::Str message, std::shared_ptr<ResultBuffer> results) const noexcept override {
    if (code != 0) {
      context_->SetStatus(to_status(code, absl::string_view(message.data(), message.size()), by_name_));
    } else {
      // `owner_type` excludes other libraries' results. Moving gives TensorFlow the only references, so later ops may
      // work in place.
      TensorResults& produced = results ? static_cast<TensorResults&>(*results) : *own_;
      for (int i = 0; i < context_->num_outputs(); ++i) context_->set_output(i, std::move(produced.outputs[i]));
    }
    done_();
  }

 private:
  OpKernelContext* context_;
  AsyncOpKernel::DoneCallback done_;
  std::shared_ptr<TensorResults> own_;
  bool by_name_;
};

// The suffix of a call's name in a loop; empty outside of loops. A session may run iterations of a loop concurrently,
// in a different order on each rank, and their calls are otherwise equal. In an inner loop the iteration number is not
// unique. So the suffix also has the frame id: a hash of the names of the loops and of the outer iterations.
inline std::string iteration(const tensorflow::FrameAndIter& frame_iter) {
  if (frame_iter.frame_id == 0 || frame_iter.frame_id == tensorflow::kIllegalFrameId) return {};
  return absl::StrCat(" [iteration ", frame_iter.iter_id, " of loop ", absl::Hex(frame_iter.frame_id), "]");
}

// Memory of freed results (dl_comm_result_alloc), of which the pages need not be made again.
class ResultMemory final : public tensorflow::TensorBuffer {
 public:
  ResultMemory(void* memory, std::size_t bytes) : TensorBuffer(memory), bytes_(bytes) {}
  ~ResultMemory() override { dl_comm_result_free(data()); }

  std::size_t size() const override { return bytes_; }
  TensorBuffer* root_buffer() override { return this; }
  void FillAllocationDescription(tensorflow::AllocationDescription*) const override {}

 private:
  const std::size_t bytes_;
};

// Allocates a new tensor for a result. Large ones in host memory lie in the memory of freed results.
inline absl::Status new_result(OpKernelContext* context, bool on_host, tensorflow::DataType dtype,
                               const tensorflow::TensorShape& shape, tensorflow::Tensor& result) {
  const auto bytes =
      static_cast<std::size_t>(shape.num_elements()) * static_cast<std::size_t>(tensorflow::DataTypeSize(dtype));
  void* const memory = on_host ? dl_comm_result_alloc(bytes) : nullptr;
  if (memory == nullptr) return context->allocate_temp(dtype, shape, &result);
  auto* const buffer = new ResultMemory(memory, bytes);
  result = tensorflow::Tensor(dtype, shape, buffer);  // which holds a reference of its own
  buffer->Unref();
  return absl::OkStatus();
}

// The common part: the conversion of a context to a `ViewList`. Constructors of kernels read the settings.
class CollectiveKernel : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) final {
    DeviceStream target;
    OP_REQUIRES_OK_ASYNC(context, device_stream(context, target), done);
    const bool on_host = target.device < 0;
    ViewList list(context->num_outputs());
    auto results = std::make_shared<TensorResults>();
    results->outputs.resize(context->num_outputs());
    OP_REQUIRES_OK_ASYNC(context, status_of([&] { return prepare(context, on_host, list, results->outputs); }), done);
    const std::string instance = iteration(context->frame_iter());
    auto completion = std::make_unique<KernelCompletion>(context, std::move(done), results, by_name_);
    // The core combines results of several calls in host memory only; it refuses GPU calls that would need it.
    submit(target, instance, list, std::move(completion), on_host ? std::move(results) : nullptr);
  }

 protected:
  // Sets the bytes of a new output to 0, in the order of the kernel's stream.
  virtual absl::Status fill_with_zeros(OpKernelContext*, tensorflow::Tensor& output) const {
    std::memset(output.data(), 0, output.TotalBytes());
    return absl::OkStatus();
  }

  // Sets `target` to the tensors' device; the default is host memory.
  virtual absl::Status device_stream(OpKernelContext*, DeviceStream&) const { return absl::OkStatus(); }

  // Allocates the outputs and adds all tensors to `list`; here, outputs like the inputs. May throw an Error.
  virtual absl::Status prepare(OpKernelContext* context, bool on_host, ViewList& list,
                               std::vector<tensorflow::Tensor>& outputs) const {
    // On a GPU the core refuses calls that return early, so no copies are needed.
    const bool copies = on_host && needs_copies();
    for (int i = 0; i < context->num_outputs(); ++i) {
      const tensorflow::Tensor& input = context->input(i);
      tensorflow::Tensor& output = outputs[i];
      const std::unique_ptr<tensorflow::Tensor> forwarded =
          context->forward_input(i, OpKernelContext::Params::kNoReservation, input.dtype(), input.shape(),
                                 tensorflow::DEVICE_MEMORY, tensorflow::AllocatorAttributes());
      if (forwarded != nullptr) {
        output = *forwarded;
      } else {
        const absl::Status allocated = new_result(context, on_host, input.dtype(), input.shape(), output);
        if (!allocated.ok()) return allocated;
      }
      if (copies && input.data() != output.data()) std::memcpy(output.data(), input.data(), input.TotalBytes());
      add(list, copies ? output : input, output);
    }
    return absl::OkStatus();
  }

  // Passes the call to the core, which copies the strings, and returns without waiting. `this` may be destroyed then.
  virtual void submit(const DeviceStream& target, rust::Str instance, const ViewList& list,
                      std::unique_ptr<Completion> completion, std::shared_ptr<ResultBuffer> results) = 0;

  // Whether the call may return before the core has read the inputs: reference variables and fed arrays may change by
  // then.
  virtual bool needs_copies() const { return false; }

  // The options of a call of this kernel. They refer to `name` and to this object.
  Options options(const DeviceStream& target, const std::string& name, rust::Str instance) const {
    // The host waits for a GPU, so that the stream continues with backward.
    const bool block_host = true;
    // Eager calls are those of the thread that waits for them.
    const bool caller_blocks = caller_blocks_ && target.device < 0;
    const bool by_pool = !caller_blocks_;
    return {name, instance, labels_, caller_blocks, by_pool, timeout_, target.device, target.stream, block_host};
  }

  std::string call_name_;
  std::string labels_;
  bool caller_blocks_ = false;
  double timeout_ = -1;
  bool by_name_ = false;
};

#ifdef DL_COMM_TF_GPU
// A kernel for tensors on a GPU. It has no HostMemory arguments, not even for int32, which TensorFlow's own kernels
// keep on the host: one list has tensors of all types, and TensorFlow copies each of them to the kernel's device.
template <class Kernel>
class OnGpu final : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  absl::Status device_stream(OpKernelContext* context, DeviceStream& target) const override {
    return device_stream_of_kernel(context, target);
  }

  absl::Status fill_with_zeros(OpKernelContext* context, tensorflow::Tensor& output) const override {
    return fill_with_zeros_on_device(context, output.data(), output.TotalBytes());
  }
};
#endif

}  // namespace dl_comm
