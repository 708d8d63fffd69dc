// The collectives on a group of ranks as ops torch.ops.dl_comm.*, four for each row of the table in codes.h:
// - NAME(tensors, ...) returns new tensors. Differentiable (python/dl_comm/torch/_autograd.py).
// - NAME_no_grad(tensors, ...) is the same without the gradient, which costs microseconds also where it is not used.
// - NAME_out(tensors, out, ...) writes to `out`, which may be `tensors` where the shapes are equal.
// - NAME_start(tensors, out, ...) is either of them without the wait: it returns the results and a number for `test`,
//   `wait_for`, `status` and `detach`. An empty `out` asks for new tensors.
// Inputs are made contiguous; `out` must be. Tensors have the shapes of the functions in python/dl_comm/torch, with
// two additions: a rank that is not the root gets an empty tensor from `reduce` and `gather`, and gives `scatter` a
// tensor of the root's shape, which is not read.
//
// Group 0 is the group of all ranks. `rank` and `size` are those of this process in the group: compiled graphs depend
// on them, so they are part of a graph. `timeout`: seconds; 0: no limit; negative: the group's. Thread rule: any thread
// may call ops.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "dl_comm/codes.h"
#include "result_memory.h"
#include "tensor_views.h"
#include "unbox.h"
#include "work.h"

namespace dl_comm::torch_ops {
namespace {

using ::torch::stable::detail::from;
using ::torch::stable::detail::to;
using Tensors = std::vector<Tensor>;
using Counts = std::vector<int64_t>;
using ::torch::stable::detail::StableLibrary;

// The arguments of a collective after its tensors.
std::string arguments_of(const CollectiveKind& kind) {
  std::string text = "int group, int rank, int size";
  if (kind.reduces) text += ", str op, float prescale, float postscale";
  if (kind.root != Root::kNone) text += ", int root";
  if (kind.exchanges()) {
    text += ", int[] send_counts, int[] receive_counts";
  } else if (!kind.same_shape()) {
    text += ", int[] counts";
  }
  return text + ", str name, float timeout, bool by_name=False";
}

// A call as Python describes it. `send` and `receive` are extents of first axes, those of the first tensor first, and
// empty for equal blocks; a collective with one list of counts has it in `send`.
struct Request {
  Request(const CollectiveKind& kind, StableIValue* stack, bool takes_out) {
    tensors = to<Tensors>(*stack++);
    if (takes_out) out = to<Tensors>(*stack++);
    group = static_cast<uint64_t>(to<int64_t>(*stack++));
    rank = to<int64_t>(*stack++);
    size = to<int64_t>(*stack++);
    if (kind.reduces) {
      op = take_string(*stack++);
      prescale = to<double>(*stack++);
      postscale = to<double>(*stack++);
    }
    if (kind.root != Root::kNone) root = to<int64_t>(*stack++);
    if (!kind.same_shape()) send = to<Counts>(*stack++);
    if (kind.exchanges()) receive = to<Counts>(*stack++);
    name = take_string(*stack++);
    timeout = to<double>(*stack++);
    by_name = to<bool>(*stack++);
  }

  Tensors tensors;
  Tensors out;
  uint64_t group = 0;
  int64_t rank = 0;
  int64_t size = 1;
  std::string op = "sum";
  double prescale = 1;
  double postscale = 1;
  int64_t root = 0;
  Counts send;
  Counts receive;
  std::string name;
  double timeout = -1;
  bool by_name = false;
};

int32_t operator_code(const Request& request) {
  const auto found = std::find_if(std::begin(kOperators), std::end(kOperators),
                                  [&](const Operator& entry) { return request.op == entry.name; });
  if (found == std::end(kOperators)) {
    std::ostringstream known;
    for (const Operator& entry : kOperators) known << (&entry == kOperators ? "'" : ", '") << entry.name << "'";
    throw Error(DL_COMM_ERROR_INVALID, "invalid op: '", request.op, "' (expected one of ", known.str(), ")");
  }
  if (request.prescale == 1 && request.postscale == 1) return found->code;
  if (found->scaled == kNoFactors) {
    throw Error(DL_COMM_ERROR_INVALID, "op='", request.op, "' takes no prescale and postscale");
  }
  return found->scaled;
}

std::shared_ptr<Work> submit(const CollectiveKind& kind, const Request& request, int32_t reduce,
                             const TensorViews& views, Tensors keep, bool blocks) {
  auto work = std::make_shared<Work>(std::move(keep), views.device_stream(), -1);
  Collective call;
  call.options = options_of(request.name, {}, blocks, request.timeout, views.device_stream());
  call.group = request.group;
  call.collective = kind.code;
  call.reduce = reduce;
  call.root = static_cast<int32_t>(std::clamp<int64_t>(request.root, -1, INT32_MAX));
  call.prescale = request.prescale;
  call.postscale = request.postscale;
  call.by_name = request.by_name;
  call.send_counts = views.send_counts();
  call.receive_counts = views.receive_counts();
  start_collective(call, views.views(), views.shapes(), completion_of(work));
  return work;
}

// One call: checks the tensors, makes the results, and starts it.
class Call {
 public:
  Call(const CollectiveKind& kind, Request given)
      : kind_(kind),
        request_(std::move(given)),
        count_(std::max(request_.tensors.size(), request_.out.size())),
        blocks_{kind, request_.rank, request_.size, request_.root, request_.send, request_.receive} {
    if (kind.reduces) reduce_ = operator_code(request_);
    // An allreduce does not depend on them.
    if (!kind.same_shape() || kind.root != Root::kNone) check_group();
    blocks_.check_counts(count_);
  }

  std::shared_ptr<Work> start(bool blocks) {
    check_length(request_.tensors, "the list");
    check_length(request_.out, "out");
    if (blocks_.reads() && request_.tensors.empty()) {
      throw Error(DL_COMM_ERROR_INVALID, "the list is empty; give at least one tensor");
    }
    TensorViews views(count_);
    keep_.reserve(2 * count_);
    results.reserve(count_);
    for (std::size_t index = 0; index < count_; ++index) add(index, views);
    return submit(kind_, request_, reduce_, views, std::move(keep_), blocks);
  }

  Tensors results;

 private:
  void check_group() const {
    int64_t rank = 0;
    int64_t size = 0;
    try {
      rank = group_rank(request_.group);
      size = group_size(request_.group);
    } catch (const rust::Error&) {
      // Only a call's completion has the code of the error.
      submit(kind_, request_, reduce_, TensorViews(0), {}, true)->wait();
      throw;
    }
    if (rank != request_.rank || size != request_.size) {
      throw Error(DL_COMM_ERROR_STATE, "the call is for rank ", request_.rank, " of ", request_.size,
                  ", and this process is rank ", rank, " of ", size, ": after finalize, call torch.compiler.reset()");
    }
    if (kind_.root != Root::kNone && (request_.root < 0 || request_.root >= request_.size)) {
      throw Error(DL_COMM_ERROR_INVALID, "invalid root: ", request_.root, " (expected a rank of the group, 0 to ",
                  request_.size - 1, ")");
    }
  }

  void check_length(const Tensors& list, const char* title) const {
    if (!list.empty() && list.size() != count_) {
      throw Error(DL_COMM_ERROR_INVALID, title, " has ", list.size(), " tensors; the call has ", count_);
    }
  }

  void add(std::size_t index, TensorViews& views) {
    const Tensor* const source = request_.tensors.empty() ? nullptr : &request_.tensors[index];
    const Tensor* const out = request_.out.empty() ? nullptr : &request_.out[index];
    if (source != nullptr) views.check_dense(*source);
    if (out != nullptr) views.check_dense(*out);
    const Tensor& given = source != nullptr ? *source : *out;
    const Extents shape = extents_of(given);
    if (kind_.same_shape()) return add(index, source, out, shape, shape, views);
    // A rank without an input has only a block: that of a scatter.
    const BlockCall blocks = blocks_.of(index);
    const int64_t own = source == nullptr ? blocks.block_rows(shape, "out") : 0;
    const Rows rows = source == nullptr ? Rows{own, own} : blocks.rows(shape, index);
    Counts result(shape.begin(), shape.end());
    if (result.empty()) result = {1};
    Counts block = result;
    result[0] = rows.result;
    block[0] = rows.block;
    views.add_counts(blocks, shape);
    add(index, source, out, result, block, views);
  }

  // Adds a tensor of which the shapes of the result and of a block are known.
  void add(std::size_t index, const Tensor* source, const Tensor* out, Extents shape, Extents block,
           TensorViews& views) {
    const Tensor& given = source != nullptr ? *source : *out;
    results.push_back(result(index, given, out, shape));
    void* const written = blocks_.writes() ? results.back().mutable_data_ptr() : nullptr;
    const void* read = kind_.same_shape() ? written : nullptr;  // the core wants both pointers of a broadcast
    if (blocks_.reads()) {
      keep_.push_back(source->is_contiguous() ? *source : ::torch::stable::contiguous(*source));
      read = keep_.back().const_data_ptr();
    }
    keep_.push_back(results.back());
    views.add_block(given, read, written, block);
  }

  // `out`, or a new tensor, for a result of this shape.
  Tensor result(std::size_t index, const Tensor& given, const Tensor* out, Extents shape) const {
    if (out == nullptr) return new_result(given, blocks_.writes() ? shape : Extents(kNoRows, 1));
    if (!out->is_contiguous()) throw Error(DL_COMM_ERROR_INVALID, "out: tensor ", index, " is not contiguous");
    const Extents sizes = extents_of(*out);
    if (blocks_.writes() && (!std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end()) ||
                             element_type(*out) != element_type(given))) {
      throw Error(DL_COMM_ERROR_INVALID, "out: tensor ", index, " has the shape ", sizes, " and type ", type_name(*out),
                  "; the result has ", shape, " and ", type_name(given));
    }
    return *out;
  }

  static constexpr int64_t kNoRows[] = {0};

  const CollectiveKind& kind_;
  const Request request_;
  const std::size_t count_;
  const BlockCall blocks_;
  int32_t reduce_ = 0;
  Tensors keep_;
};

// The ops of a collective.
template <int32_t kCode>
struct Ops {
  static constexpr const CollectiveKind& kKind = *find_collective(kCode);

  static void run(StableIValue* stack, uint64_t, uint64_t) {
    Call call(kKind, Request(kKind, stack, false));
    call.start(true)->wait();
    stack[0] = from(call.results);
  }

  static void run_out(StableIValue* stack, uint64_t, uint64_t) {
    Call call(kKind, Request(kKind, stack, true));
    call.start(true)->wait();
  }

  static void start(StableIValue* stack, uint64_t, uint64_t) {
    Call call(kKind, Request(kKind, stack, true));
    const int64_t number = register_work(call.start(false));
    stack[0] = from(call.results);
    stack[1] = from(number);
  }

  static void define(StableLibrary& library) {
    const std::string name = kKind.name;
    const std::string rest = arguments_of(kKind);
    const std::string with_out = "(Tensor[] tensors, Tensor(a!)[] out, " + rest;
    library.def((name + "(Tensor[] tensors, " + rest + ") -> Tensor[]").c_str());
    library.def((name + "_no_grad(Tensor[] tensors, " + rest + ") -> Tensor[]").c_str());
    library.def((name + "_out" + with_out + ") -> ()").c_str());
    library.def((name + "_start" + with_out + ") -> (Tensor[], int)").c_str());
  }

  static void implement(StableLibrary& library) {
    const std::string name = kKind.name;
    library.impl(name.c_str(), &run);
    library.impl((name + "_no_grad").c_str(), &run);
    library.impl((name + "_out").c_str(), &run_out);
    library.impl((name + "_start").c_str(), &start);
  }
};

template <int32_t... kCodes>
struct Table {
  static void define(StableLibrary& library) { (Ops<kCodes>::define(library), ...); }
  static void implement(StableLibrary& library) { (Ops<kCodes>::implement(library), ...); }
};

// All but the barrier, which has no tensors.
using All = Table<DL_COMM_ALLREDUCE, DL_COMM_BROADCAST, DL_COMM_REDUCE, DL_COMM_ALLGATHER, DL_COMM_GATHER,
                  DL_COMM_SCATTER, DL_COMM_REDUCE_SCATTER, DL_COMM_ALLTOALL>;

int32_t find_group(uint64_t group, int32_t* rank, int32_t* size) {
  try {
    *rank = group_rank(group);
    *size = group_size(group);
    return 0;
  } catch (const rust::Error&) {
    return DL_COMM_ERROR_INVALID;
  }
}

}  // namespace
}  // namespace dl_comm::torch_ops

// Stores this process's rank in a group, and the number of its ranks. Returns 0, or an error code of dl_comm.h. For
// the fake kernels: not an op, because tracing replaces ops.
extern "C" __attribute__((visibility("default"))) int32_t dl_comm_ops_group(uint64_t group, int32_t* rank,
                                                                            int32_t* size) {
  return dl_comm::torch_ops::find_group(group, rank, size);
}

STABLE_TORCH_LIBRARY_FRAGMENT(dl_comm, library) { dl_comm::torch_ops::All::define(library); }

STABLE_TORCH_LIBRARY_IMPL(dl_comm, CompositeExplicitAutograd, library) { dl_comm::torch_ops::All::implement(library); }
