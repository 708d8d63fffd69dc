// The collectives of the backend: each checks its arguments, describes a call of the core, and launches it.
#include <c10/util/Exception.h>

#include <numeric>

#include "backend.h"
#include "dl_comm/blocks.h"
#include "lists.h"
#include "shared_memory.h"

namespace dl_comm::c10d_backend {
namespace {

using OpType = ::c10d::OpType;

// From here on, a broadcast for each rank is faster than an all-gather through a copy of all blocks.
constexpr std::size_t kLongBlock = 256 << 10;

const Tensors& only(const std::vector<Tensors>& lists, const char* what) {
  if (lists.size() != 1) throw_invalid(c10::str(what, ": ", lists.size(), " lists; each rank has one"));
  return lists[0];
}

// The list with a block for each rank: this rank's block, or every block of equal ones, is as long as `block`.
const Tensors& blocks_like(const at::Tensor& block, const std::vector<Tensors>& lists, bool equal, const Backend& group,
                           const char* what) {
  const auto& list = only(lists, what);
  check_alike(list, what);
  const auto own = static_cast<std::size_t>(group.getRank());
  const auto size = static_cast<std::size_t>(group.getSize());
  if (list.size() != size || list[own].numel() != block.numel() || (equal && !is_even(list))) {
    const std::string which = equal ? "each" : c10::str("that of rank ", own);
    throw_invalid(c10::str(what, ": ", list.size(), " tensors for ", size, " ranks; ", which, " must have ",
                           block.numel(), " elements"));
  }
  return list;
}

// Where a rank's block begins in the elements of the list.
int64_t start_of(const Tensors& list, int rank) {
  return std::accumulate(list.begin(), list.begin() + rank, int64_t{0},
                         [](int64_t sum, const at::Tensor& tensor) { return sum + tensor.numel(); });
}

void check_contiguous(const at::Tensor& tensor, const char* what) {
  check_dense(tensor, what);
  if (!tensor.is_contiguous()) throw_invalid(c10::str(what, " is not contiguous (strides ", tensor.strides(), ")"));
}

// Checks that there is an output for each input, at least one.
void check_pairs(const Tensors& inputs, const Tensors& outputs, const char* what) {
  if (outputs.size() != inputs.size() || inputs.empty())
    throw_invalid(c10::str(what, ": ", inputs.size(), " inputs and ", outputs.size(), " outputs"));
  for (const auto& input : inputs) check_dense(input, what);
  for (const auto& output : outputs) check_contiguous(output, what);
}

void check_blocks(const at::Tensor& whole, const at::Tensor& block, int size, const char* what) {
  if (whole.numel() != block.numel() * size)
    throw_invalid(c10::str(what, ": ", whole.numel(), " elements are not ", size, " blocks of ", block.numel()));
}

// The lengths of the blocks along the first dimension; empty for equal blocks. `title` names the tensor in messages.
std::vector<std::size_t> block_lengths(const at::Tensor& tensor, const std::vector<int64_t>& splits, int size,
                                       const char* title) {
  static constexpr int64_t kOneRow[] = {1};
  const Extents shape = tensor.dim() == 0 ? Extents(kOneRow, 1) : Extents(tensor.sizes());
  check_cut(shape, splits, size, title, "split sizes");
  return in_elements(splits, row_length(shape));
}

// Waits for a call that torch has made asynchronous.
void wait_if_started(const WorkPtr& work) {
  if (work) work->wait();
}

void synchronize(const at::Device& device) {
  if (device.is_cuda()) current_stream(device).synchronize();
}

}  // namespace

WorkPtr Backend::allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& options) {
  return checked("dl_comm:all_reduce", options.timeout, [&] {
    if (tensors.size() == 1 && tensors[0].is_sparse()) return allreduce_sparse(tensors, options);
    const auto& tensor = only(tensors, "all_reduce");
    if (!is_in_use(tensor)) share_bucket(tensor);
    Call call(DL_COMM_ALLREDUCE, "dl_comm:all_reduce", false);
    call.set_reduce(options.reduceOp, tensor.scalar_type());
    call.add(tensor, tensor, tensor);
    call.outputs = tensors;
    return launch(std::move(call), OpType::ALLREDUCE, options.asyncOp, options.timeout);
  });
}

WorkPtr Backend::allreduce_coalesced(Tensors& tensors, const ::c10d::AllreduceCoalescedOptions& options) {
  return checked("dl_comm:all_reduce_coalesced", options.timeout, [&] {
    check_alike(tensors, "all_reduce_coalesced");
    Call call(DL_COMM_ALLREDUCE, "dl_comm:all_reduce_coalesced", false);
    call.set_reduce(options.reduceOp, tensors[0].scalar_type());
    for (const auto& tensor : tensors) call.add(tensor, tensor, tensor);
    call.outputs = tensors;
    return launch(std::move(call), OpType::ALLREDUCE_COALESCED, options.asyncOp, options.timeout);
  });
}

WorkPtr Backend::allreduce_sparse(Tensors& tensors, const ::c10d::AllreduceOptions& options) {
  if (tensors.size() != 1 || !tensors[0].is_sparse()) throw_invalid("all_reduce: expected one sparse COO tensor");
  if (options.reduceOp.op_ != ::c10d::ReduceOp::SUM) throw_invalid("all_reduce of a sparse tensor: only SUM");
  const auto input = tensors[0].coalesce();
  // Every rank gets all ranks' values and adds them up.
  auto sizes = at::empty({getSize()}, at::kLong);
  auto size = at::full({1}, input._nnz(), at::kLong);
  ::c10d::AllgatherOptions gather;
  gather.timeout = options.timeout;
  gather.asyncOp = false;
  wait_if_started(_allgather_base(sizes, size, gather));
  const auto all = [&](const at::Tensor& mine) {
    std::vector<Tensors> parts(1);
    for (int rank = 0; rank < getSize(); ++rank) {
      auto shape = mine.sizes().vec();
      shape[0] = sizes[rank].item<int64_t>();
      parts[0].push_back(at::empty(shape, mine.options()));
    }
    Tensors inputs{mine.contiguous()};
    wait_if_started(allgather(parts, inputs, gather));
    return at::cat(parts[0]);
  };
  // Indices have a row for each dimension.
  const auto indices = all(input.indices().t()).t();
  const auto values = all(input.values());
  tensors[0].copy_(at::sparse_coo_tensor(indices, values, input.sizes(), input.options()).coalesce());
  return c10::make_intrusive<EndedWork>(getRank(), OpType::_ALLREDUCE_SPARSE, tensors);
}

WorkPtr Backend::broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& options) {
  return checked("dl_comm:broadcast", options.timeout, [&] {
    const auto& tensor = only(tensors, "broadcast");
    check_rank(options.rootRank);
    Call call(DL_COMM_BROADCAST, "dl_comm:broadcast", true);
    call.root = static_cast<int>(options.rootRank);
    call.add(tensor, tensor, tensor);
    call.outputs = tensors;
    return launch(std::move(call), OpType::BROADCAST, options.asyncOp, options.timeout);
  });
}

WorkPtr Backend::reduce(Tensors& tensors, const ::c10d::ReduceOptions& options) {
  return checked("dl_comm:reduce", options.timeout, [&] {
    const auto& tensor = only(tensors, "reduce");
    check_rank(options.rootRank);
    Call call(DL_COMM_REDUCE, "dl_comm:reduce", false);
    call.root = static_cast<int>(options.rootRank);
    call.set_reduce(options.reduceOp, tensor.scalar_type());
    call.add(tensor, call.root == getRank() ? tensor : at::Tensor(), tensor);
    call.outputs = tensors;
    return launch(std::move(call), OpType::REDUCE, options.asyncOp, options.timeout);
  });
}

WorkPtr Backend::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const ::c10d::AllgatherOptions& options) {
  return checked("dl_comm:all_gather", options.timeout, [&] {
    const auto input = only(inputs, "all_gather").contiguous();
    const auto& list = blocks_like(input, outputs, false, *this, "all_gather's outputs");
    if (!options.asyncOp && !is_coalescing() && !is_adjacent(list) && is_even(list) && input.nbytes() >= kLongBlock)
      return allgather_by_broadcasts(list, input, options);
    auto flat = flat_output(list);
    Call call(DL_COMM_ALLGATHER, "dl_comm:all_gather", true);
    const auto source = without_overlap(input, flat.tensor, flat.tensor, input, start_of(list, getRank()));
    if (is_even(list)) {
      call.add(source, flat.tensor, source);
    } else {
      call.send_counts = lengths(list);
      call.add(source, flat.tensor, static_cast<std::size_t>(input.numel()));
    }
    call.finish = std::move(flat.copy_back);
    call.outputs = list;
    call.output_lists = outputs;
    return launch(std::move(call), OpType::ALLGATHER, options.asyncOp, options.timeout);
  });
}

WorkPtr Backend::allgather_by_broadcasts(const Tensors& outputs, const at::Tensor& input,
                                         const ::c10d::AllgatherOptions& options) {
  for (int root = 0; root < getSize(); ++root) {
    const auto& output = outputs[static_cast<std::size_t>(root)];
    // In the order of the indices, as the input.
    const auto memory = output.is_contiguous() ? output : at::empty_like(output, at::MemoryFormat::Contiguous);
    Call call(DL_COMM_BROADCAST, "dl_comm:all_gather", true);
    call.root = root;
    call.add(root == getRank() ? without_overlap(input, memory, memory, input, 0) : memory, memory, memory);
    if (!memory.is_same(output)) call.finish = [output, memory] { output.detach().copy_(memory); };
    wait_if_started(launch(std::move(call), OpType::ALLGATHER, false, options.timeout));
  }
  return nullptr;
}

WorkPtr Backend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                     const ::c10d::AllgatherOptions& options) {
  // outputs[rank][i] is tensor i of a rank.
  std::vector<WorkPtr> works;
  auto each = options;
  each.asyncOp = true;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    std::vector<Tensors> parts(1);
    for (auto& list : outputs) parts[0].push_back(list.at(i));
    Tensors input{inputs[i]};
    works.push_back(allgather(parts, input, each));
  }
  return c10::make_intrusive<WorkList>(std::move(works));
}

WorkPtr Backend::_allgather_base(at::Tensor& output, at::Tensor& input, const ::c10d::AllgatherOptions& options) {
  Tensors outputs{output};
  Tensors inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

WorkPtr Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                 const ::c10d::AllgatherOptions& options) {
  return checked("dl_comm:all_gather_into_tensor", options.timeout, [&] {
    const char* const what = "all_gather_into_tensor";
    check_pairs(inputs, outputs, what);
    Call call(DL_COMM_ALLGATHER, "dl_comm:all_gather_into_tensor", true);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      check_blocks(outputs[i], inputs[i], getSize(), what);
      const auto input = inputs[i].contiguous();
      call.add(without_overlap(input, outputs[i], outputs[i], input, getRank() * input.numel()), outputs[i], input);
    }
    call.outputs = outputs;
    return launch(std::move(call), OpType::_ALLGATHER_BASE, options.asyncOp, options.timeout);
  });
}

WorkPtr Backend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const ::c10d::GatherOptions& options) {
  return checked("dl_comm:gather", options.timeout, [&] {
    const auto input = only(inputs, "gather").contiguous();
    check_rank(options.rootRank);
    Call call(DL_COMM_GATHER, "dl_comm:gather", true);
    call.root = static_cast<int>(options.rootRank);
    Flat flat;
    if (call.root == getRank()) {
      const auto& list = blocks_like(input, outputs, true, *this, "gather's outputs");
      flat = flat_output(list);
      call.outputs = list;
      call.output_lists = outputs;
    } else if (!outputs.empty() && !outputs[0].empty()) {
      throw_invalid("gather: only the root has outputs");
    }
    const auto& whole = flat.tensor;
    call.add(whole.defined() ? without_overlap(input, whole, whole, input, getRank() * input.numel()) : input, whole,
             input);
    call.finish = std::move(flat.copy_back);
    return launch(std::move(call), OpType::GATHER, options.asyncOp, options.timeout);
  });
}

#ifdef C10D_BACKEND_HAS_WINDOW
WorkPtr Backend::gather_single(at::Tensor& output, at::Tensor& input, const ::c10d::GatherOptions& options) {
  check_dense(input, "gather_single");
  std::vector<Tensors> outputs;
  if (options.rootRank == getRank()) {
    check_contiguous(output, "gather_single");
    check_blocks(output, input, getSize(), "gather_single");
    outputs.push_back(output.view({getSize(), input.numel()}).unbind(0));
  }
  Tensors inputs{input.contiguous().view({input.numel()})};
  return gather(outputs, inputs, options);
}
#endif

WorkPtr Backend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const ::c10d::ScatterOptions& options) {
  return checked("dl_comm:scatter", options.timeout, [&] {
    const auto& output = only(outputs, "scatter");
    check_rank(options.rootRank);
    Call call(DL_COMM_SCATTER, "dl_comm:scatter", true);
    call.root = static_cast<int>(options.rootRank);
    at::Tensor source;
    if (call.root == getRank()) {
      source = flat_input(blocks_like(output, inputs, true, *this, "scatter's inputs"));
    } else if (!inputs.empty() && !inputs[0].empty()) {
      throw_invalid("scatter: only the root has inputs");
    }
    const auto flat = flat_output(outputs);
    if (source.defined())
      source = without_overlap(source, flat.tensor, source, flat.tensor, getRank() * output.numel());
    call.add(source, flat.tensor, flat.tensor.view(output.sizes()));
    call.finish = flat.copy_back;
    call.outputs = outputs;
    return launch(std::move(call), OpType::SCATTER, options.asyncOp, options.timeout);
  });
}

WorkPtr Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                const ::c10d::ReduceScatterOptions& options) {
  return checked("dl_comm:reduce_scatter", options.timeout, [&] {
    const auto& output = only(outputs, "reduce_scatter");
    const auto& list = blocks_like(output, inputs, false, *this, "reduce_scatter's inputs");
    const auto flat = flat_output(outputs);
    const auto whole = flat_input(list);
    const auto source = without_overlap(whole, flat.tensor, whole, flat.tensor, start_of(list, getRank()));
    Call call(DL_COMM_REDUCE_SCATTER, "dl_comm:reduce_scatter", false);
    call.set_reduce(options.reduceOp, output.scalar_type());
    if (is_even(list)) {
      call.add(source, flat.tensor, flat.tensor.view(output.sizes()));
    } else {
      call.send_counts = lengths(list);
      call.add(source, flat.tensor, static_cast<std::size_t>(output.numel()));
    }
    call.finish = flat.copy_back;
    call.outputs = outputs;
    return launch(std::move(call), OpType::REDUCE_SCATTER, options.asyncOp, options.timeout);
  });
}

WorkPtr Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                      const ::c10d::ReduceScatterOptions& options) {
  Tensors outputs{output};
  Tensors inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

WorkPtr Backend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                 const ::c10d::ReduceScatterOptions& options) {
  return checked("dl_comm:reduce_scatter_tensor", options.timeout, [&] {
    const char* const what = "reduce_scatter_tensor";
    check_pairs(inputs, outputs, what);
    check_alike(inputs, what);
    Call call(DL_COMM_REDUCE_SCATTER, "dl_comm:reduce_scatter_tensor", false);
    call.set_reduce(options.reduceOp, inputs[0].scalar_type());
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      check_blocks(inputs[i], outputs[i], getSize(), what);
      const auto input = inputs[i].contiguous();
      call.add(without_overlap(input, outputs[i], input, outputs[i], getRank() * outputs[i].numel()), outputs[i],
               outputs[i]);
    }
    call.outputs = outputs;
    return launch(std::move(call), OpType::_REDUCE_SCATTER_BASE, options.asyncOp, options.timeout);
  });
}

WorkPtr Backend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                               std::vector<int64_t>& input_splits, const ::c10d::AllToAllOptions& options) {
  return checked("dl_comm:all_to_all_single", options.timeout, [&] {
    const char* const what = "all_to_all_single";
    check_contiguous(output, what);
    check_dense(input, what);
    const auto source = overlap(input, output) ? input.clone(at::MemoryFormat::Contiguous) : input.contiguous();
    auto send = block_lengths(source, input_splits, getSize(), "all_to_all_single: input");
    auto receive = block_lengths(output, output_splits, getSize(), "all_to_all_single: output");
    Call call(DL_COMM_ALLTOALL, "dl_comm:all_to_all_single", true);
    if (send.empty() && receive.empty()) {
      if (source.numel() != output.numel())
        throw_invalid(
            c10::str(what, ": ", source.numel(), " elements in the input and ", output.numel(), " in the output"));
      call.add(source, output, static_cast<std::size_t>(source.numel() / getSize()));
    } else {
      const auto even = [this](const at::Tensor& tensor) {
        return std::vector<std::size_t>(getSize(), static_cast<std::size_t>(tensor.numel() / getSize()));
      };
      call.send_counts = send.empty() ? even(source) : std::move(send);
      call.receive_counts = receive.empty() ? even(output) : std::move(receive);
      call.add(source, output, std::size_t{0});
    }
    call.outputs = {output};
    return launch(std::move(call), OpType::ALLTOALL_BASE, options.asyncOp, options.timeout);
  });
}

WorkPtr Backend::alltoall(Tensors& outputs, Tensors& inputs, const ::c10d::AllToAllOptions& options) {
  return checked("dl_comm:all_to_all", options.timeout, [&] {
    check_alike(inputs, "all_to_all's inputs");
    check_alike(outputs, "all_to_all's outputs");
    const auto size = static_cast<std::size_t>(getSize());
    if (inputs.size() != size || outputs.size() != size)
      throw_invalid(
          c10::str("all_to_all: ", inputs.size(), " inputs and ", outputs.size(), " outputs for ", size, " ranks"));
    auto flat = flat_output(outputs);
    auto source = flat_input(inputs);
    if (overlap(source, flat.tensor)) source = source.clone();
    Call call(DL_COMM_ALLTOALL, "dl_comm:all_to_all", true);
    call.send_counts = lengths(inputs);
    call.receive_counts = lengths(outputs);
    call.add(source, flat.tensor, std::size_t{0});
    call.finish = std::move(flat.copy_back);
    call.outputs = outputs;
    return launch(std::move(call), OpType::ALLTOALL, options.asyncOp, options.timeout);
  });
}

WorkPtr Backend::barrier(const ::c10d::BarrierOptions& options) {
  static_cast<void>(group());  // an error after the end, and in a forked child
  // As with the backends of torch, the calls that were started before have ended on all ranks.
  wait_for_started();
  if (options.device) synchronize(*options.device);
  for (const auto device : options.device_ids)
    synchronize(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device)));
  return launch(Call(DL_COMM_BARRIER, "dl_comm:barrier", true), OpType::BARRIER, options.asyncOp, options.timeout);
}

void Backend::monitoredBarrier(const ::c10d::BarrierOptions& options, bool /*wait_all_ranks*/) {
  // The error names all missing ranks. 0 does not wait; elsewhere it stands for the group's deadline.
  const auto timeout = options.timeout.count() == 0 ? Milliseconds(1) : options.timeout;
  wait_if_started(launch(Call(DL_COMM_BARRIER, "dl_comm:monitored_barrier", true), OpType::BARRIER, false, timeout));
}

}  // namespace dl_comm::c10d_backend
