// torch.distributed's backend "dl_comm": a process group on a group of the core.
//
// Source of the interface: torch/csrc/distributed/c10d/Backend.hpp, whose old names (such as _allgather_base) every
// version from 2.10 on calls.
#pragma once

#include <c10/util/FunctionRef.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "call.h"
#include "device.h"
#include "work.h"

namespace dl_comm::c10d_backend {

using Work = ::c10d::Work;
using WorkPtr = c10::intrusive_ptr<Work>;
using Tensors = std::vector<at::Tensor>;
using Milliseconds = std::chrono::milliseconds;

// Calls that the script waits for at once (asyncOp is false) run in the calling thread and return no Work. The others
// run on threads of the group.
//
// Thread rule: any thread.
class Backend final : public ::c10d::Backend {
 public:
  // Makes a group of `ranks` (of the job, in the order of the group's ranks). Collective over them.
  Backend(int rank, std::vector<int> ranks, const std::string& name, Milliseconds timeout);
  ~Backend() override;

  const std::string getBackendName() const override { return "dl_comm"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(Milliseconds timeout) override { timeout_ = timeout; }
  ::c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;
  uint64_t getSequenceNumberForGroup() override { return number_; }
  void setSequenceNumberForGroup() override {}

  // Members only: other ranks of the parent get null at once.
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<::c10d::Backend> split(const c10::intrusive_ptr<::c10d::Store>& store,
                                            const std::vector<int>& ranks,
                                            const c10::intrusive_ptr<Options>& options) override;

  // Between the two, calls return a Work each, and the last returns one for all.
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  // Tensors in memory that the ranks of the host share.
  bool supportsTensorAlloc(c10::DeviceIndex device) override { return device < 0; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  WorkPtr allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const ::c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const ::c10d::AllreduceOptions& options) override;
  WorkPtr broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const ::c10d::ReduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const ::c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const ::c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const ::c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const ::c10d::AllgatherOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const ::c10d::GatherOptions& options) override;
#ifdef C10D_BACKEND_HAS_WINDOW
  WorkPtr gather_single(at::Tensor& output, at::Tensor& input, const ::c10d::GatherOptions& options) override;
#endif
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const ::c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const ::c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const ::c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const ::c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const ::c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const ::c10d::AllToAllOptions& options) override;
  WorkPtr barrier(const ::c10d::BarrierOptions& options) override;
  void monitoredBarrier(const ::c10d::BarrierOptions& options, bool wait_all_ranks) override;
  WorkPtr send(Tensors& tensors, int peer, int tag) override;
  WorkPtr recv(Tensors& tensors, int peer, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

 private:
  // Runs `start`, which describes and launches a collective. If that fails for want of memory, say, perhaps on this
  // rank only, the others get this error too, instead of waiting for the call.
  WorkPtr checked(const char* title, Milliseconds timeout, c10::function_ref<WorkPtr()> start);
  // Whether a started call uses the memory of this tensor.
  bool is_in_use(const at::Tensor& tensor);
  // Runs a collective, to its end unless `is_async`.
  WorkPtr launch(Call call, ::c10d::OpType type, bool is_async, Milliseconds timeout);
  // An all-gather of long blocks into tensors that do not lie one after the other.
  WorkPtr allgather_by_broadcasts(const Tensors& outputs, const at::Tensor& input,
                                  const ::c10d::AllgatherOptions& options);
  WorkPtr transfer(at::Tensor tensor, int peer, int tag, ::c10d::OpType type);
  // Adds a Work to those between startCoalescing and endCoalescing.
  WorkPtr started(c10::intrusive_ptr<CallWork> work);
  bool is_coalescing();
  // Waits for the calls that this process has started.
  void wait_for_started();
  double seconds(Milliseconds timeout) const;
  // The group, which lives at least as long as the result.
  std::shared_ptr<dl_comm_group_t> group() const;
  void check_rank(int64_t rank) const;

  const std::vector<int> ranks_;
  const std::string name_;
  // A forked child must not end the parent's group.
  const int process_;
  // The deadline with which the group was made.
  const Milliseconds group_timeout_;
  std::atomic<Milliseconds> timeout_;
  std::atomic<uint64_t> number_{0};
  // The code of the error that has ended the group.
  const std::shared_ptr<std::atomic<int>> failure_ = std::make_shared<std::atomic<int>>(0);
  CommStreams streams_;
  mutable std::mutex mutex_;
  std::shared_ptr<dl_comm_group_t> group_;
  std::vector<std::weak_ptr<CallState>> started_;
  size_t sweep_at_ = 0;  // at how many of them to remove those that torch has dropped
  // The thread between startCoalescing and endCoalescing.
  std::thread::id coalescing_;
  std::vector<WorkPtr> coalesced_;
  std::mutex split_mutex_;
  // The last split: torch splits once for each type of device, and each must get the same object.
  std::vector<int> split_ranks_;
  std::string split_name_;
  c10::weak_intrusive_ptr<::c10d::Backend> split_{c10::intrusive_ptr<::c10d::Backend>()};
};

}  // namespace dl_comm::c10d_backend
