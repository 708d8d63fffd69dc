// The collectives on a group of ranks as ops torch.ops.dl_comm.*, four for each row of a table:
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
#include <memory>
#include <numeric>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

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

// What a tensor holds: one block, or a block for each rank along the first axis.
enum class Blocks { kOne, kPerRank };

// The ranks that have inputs and outputs: all; only the root has inputs; only the root has outputs.
enum class Root { kNone, kSource, kTarget };

// A collective. `code` is that of dl_comm.h.
struct Kind {
  const char* name;
  int32_t code;
  Blocks in;
  Blocks out;
  bool reduces;
  Root root;

  constexpr bool same_shape() const { return in == Blocks::kOne && out == Blocks::kOne; }
  constexpr bool exchanges() const { return in == Blocks::kPerRank && out == Blocks::kPerRank; }
};

constexpr Kind kAllreduce{"allreduce", 1, Blocks::kOne, Blocks::kOne, true, Root::kNone};
constexpr Kind kBroadcast{"broadcast", 2, Blocks::kOne, Blocks::kOne, false, Root::kSource};
constexpr Kind kReduce{"reduce", 4, Blocks::kOne, Blocks::kOne, true, Root::kTarget};
constexpr Kind kAllGather{"all_gather", 5, Blocks::kOne, Blocks::kPerRank, false, Root::kNone};
constexpr Kind kGather{"gather", 6, Blocks::kOne, Blocks::kPerRank, false, Root::kTarget};
constexpr Kind kScatter{"scatter", 7, Blocks::kPerRank, Blocks::kOne, false, Root::kSource};
constexpr Kind kReduceScatter{"reduce_scatter", 8, Blocks::kPerRank, Blocks::kOne, true, Root::kNone};
constexpr Kind kAllToAll{"all_to_all", 9, Blocks::kPerRank, Blocks::kPerRank, false, Root::kNone};

constexpr int32_t kScaledSum = 8;
constexpr std::pair<const char*, int32_t> kOperators[] = {{"sum", 0},    {"mean", 1},    {"min", 2},
                                                          {"max", 3},    {"product", 4}, {"bit_and", 5},
                                                          {"bit_or", 6}, {"bit_xor", 7}, {"adasum", 9}};

// The arguments of a collective after its tensors.
std::string arguments_of(const Kind& kind) {
  std::string text = "int group, int rank, int size";
  if (kind.reduces) text += ", str op, float prescale, float postscale";
  if (kind.root != Root::kNone) text += ", int root";
  if (kind.exchanges()) {
    text += ", int[] send_counts, int[] receive_counts";
  } else if (!kind.same_shape()) {
    text += ", int[] counts";
  }
  return text + ", str name, float timeout";
}

// A call as Python describes it. `send` and `receive` are extents of first axes, empty for equal blocks; a collective
// with one list of counts has it in `send`.
struct Request {
  Request(const Kind& kind, StableIValue* stack, bool takes_out) {
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
};

int32_t operator_code(const Request& request) {
  const auto found = std::find_if(std::begin(kOperators), std::end(kOperators),
                                  [&](const auto& entry) { return request.op == entry.first; });
  if (found == std::end(kOperators)) {
    std::ostringstream known;
    for (const auto& entry : kOperators) known << (&entry == kOperators ? "'" : ", '") << entry.first << "'";
    throw make_error(-1, "invalid op: '", request.op, "' (expected one of ", known.str(), ")");
  }
  if (request.prescale == 1 && request.postscale == 1) return found->second;
  if (found->second != 0) {
    throw make_error(-1, "prescale and postscale are factors of a sum, not of op='", request.op, "'");
  }
  return kScaledSum;
}

template <typename List>
std::string list_text(const List& numbers) {
  std::ostringstream text;
  text << '[';
  const char* separator = "";
  for (const int64_t number : numbers) text << std::exchange(separator, ", ") << number;
  text << ']';
  return text.str();
}

int64_t sum_of(const Counts& counts) { return std::accumulate(counts.begin(), counts.end(), int64_t{0}); }

std::shared_ptr<Work> submit(const Kind& kind, const Request& request, int32_t reduce, const TensorViews& views,
                             Tensors keep, const std::vector<std::size_t>& send,
                             const std::vector<std::size_t>& receive, bool blocks) {
  auto work = std::make_shared<Work>(std::move(keep), views.device_stream(), -1);
  const auto slice = [](const std::vector<std::size_t>& counts) {
    return counts.empty() ? rust::Slice<const std::size_t>() : rust::Slice(counts.data(), counts.size());
  };
  Collective call;
  call.group = request.group;
  call.collective = kind.code;
  call.reduce = reduce;
  call.root = static_cast<int32_t>(std::clamp<int64_t>(request.root, -1, INT32_MAX));
  call.prescale = request.prescale;
  call.postscale = request.postscale;
  call.send_counts = slice(send);
  call.receive_counts = slice(receive);
  call.name = {request.name.data(), request.name.size()};
  call.caller_blocks = blocks;
  call.timeout = request.timeout;
  call.device = views.device_stream().device;
  call.stream = views.device_stream().stream;
  call.block_host = false;
  start_collective(call, views.tensors(), views.shapes(), completion_of(work));
  return work;
}

// One call: checks the tensors, makes the results, and starts it.
class Call {
 public:
  Call(const Kind& kind, Request request) : kind_(kind), request_(std::move(request)) {
    if (kind.reduces) reduce_ = operator_code(request_);
    // An allreduce does not depend on them.
    if (!kind.same_shape() || kind.root != Root::kNone) check_group();
    check_counts();
  }

  std::shared_ptr<Work> start(bool blocks) {
    const std::size_t count = std::max(request_.tensors.size(), request_.out.size());
    const auto check_length = [count](const Tensors& list, const char* title) {
      if (!list.empty() && list.size() != count) {
        throw make_error(-1, title, " has ", list.size(), " tensors; the call has ", count);
      }
    };
    check_length(request_.tensors, "the list");
    check_length(request_.out, "out");
    if (reads() && request_.tensors.empty()) throw make_error(-1, "the list is empty; give at least one tensor");
    TensorViews views(count, no_labels_);
    keep_.reserve(2 * count);
    results.reserve(count);
    for (std::size_t index = 0; index < count; ++index) add(index, views);
    return submit(kind_, request_, reduce_, views, std::move(keep_), send_, receive_, blocks);
  }

  Tensors results;

 private:
  bool is_root() const { return request_.rank == request_.root; }
  bool reads() const { return kind_.root != Root::kSource || is_root(); }
  bool writes() const { return kind_.root != Root::kTarget || is_root(); }

  void check_group() const {
    int64_t rank = 0;
    int64_t size = 0;
    try {
      rank = group_rank(request_.group);
      size = group_size(request_.group);
    } catch (const rust::Error&) {
      // Only a call's completion has the code of the error.
      submit(kind_, request_, reduce_, TensorViews(0, no_labels_), {}, {}, {}, true)->wait();
      throw;
    }
    if (rank != request_.rank || size != request_.size) {
      throw make_error(-3, "the call is for rank ", request_.rank, " of ", request_.size, ", and this process is rank ",
                       rank, " of ", size, ": after finalize, call torch.compiler.reset()");
    }
    if (kind_.root != Root::kNone && (request_.root < 0 || request_.root >= request_.size)) {
      throw make_error(-1, "invalid root: ", request_.root, " (expected a rank of the group, 0 to ", request_.size - 1,
                       ")");
    }
  }

  void check_counts() const {
    if (kind_.exchanges() && request_.send.empty() != request_.receive.empty()) {
      throw make_error(-1, "receive_counts without send_counts; give both");
    }
    for (const Counts* counts : {&request_.send, &request_.receive}) {
      if (counts->empty()) continue;
      const bool negative = std::any_of(counts->begin(), counts->end(), [](int64_t count) { return count < 0; });
      if (negative || static_cast<int64_t>(counts->size()) != request_.size) {
        throw make_error(-1, "invalid counts: ", list_text(*counts), " (expected ", request_.size,
                         " extents, one for each rank)");
      }
      const std::size_t tensors = std::max(request_.tensors.size(), request_.out.size());
      if (tensors != 1) throw make_error(-1, "blocks of different lengths need one tensor, not ", tensors);
    }
  }

  // The shape of the result for an input of this shape.
  Counts result_shape(std::size_t index, const Tensor& source) const {
    const auto sizes = source.sizes();
    Counts shape(sizes.begin(), sizes.end());
    if (kind_.same_shape()) return shape;
    if (kind_.in == Blocks::kOne) {
      if (shape.empty()) shape = {1};
      if (!request_.send.empty() && shape[0] != request_.send[request_.rank]) {
        throw make_error(-1, "counts has ", request_.send[request_.rank], " for this rank; its tensor's first axis is ",
                         shape[0]);
      }
      shape[0] = request_.send.empty() ? shape[0] * request_.size : sum_of(request_.send);
      return shape;
    }
    if (request_.send.empty()) {
      if (shape.empty() || shape[0] % request_.size != 0) {
        throw make_error(-1, "tensor ", index, " has the shape ", list_text(shape),
                         "; its first axis must be a multiple of the ", request_.size, " ranks");
      }
      if (kind_.out == Blocks::kOne) shape[0] /= request_.size;
      return shape;
    }
    if (shape.empty() || shape[0] != sum_of(request_.send)) {
      throw make_error(-1, "the counts ", list_text(request_.send), " have the sum ", sum_of(request_.send),
                       "; tensor ", index, " has the shape ", list_text(shape));
    }
    shape[0] = kind_.out == Blocks::kOne ? request_.send[request_.rank] : sum_of(request_.receive);
    return shape;
  }

  void check_out(std::size_t index, const Tensor& out, const Counts& shape, const Tensor& source) const {
    if (!out.is_contiguous()) throw make_error(-1, "out: tensor ", index, " is not contiguous");
    const auto sizes = out.sizes();
    const bool equal = std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end());
    if (equal && element_type(out) == element_type(source)) return;
    throw make_error(-1, "out: tensor ", index, " has the shape ", list_text(sizes), " and type ", type_name(out),
                     "; the result has ", list_text(shape), " and ", type_name(source));
  }

  // The shape of a block, on which the ranks must agree.
  Counts block_shape(const Tensor& given, Blocks held) const {
    const auto sizes = given.sizes();
    Counts shape(sizes.begin(), sizes.end());
    if (kind_.same_shape()) return shape;
    if (shape.empty()) shape = {1};
    if (held == Blocks::kPerRank) shape[0] /= request_.size;
    return shape;
  }

  void add(std::size_t index, TensorViews& views) {
    const Tensor* const source = request_.tensors.empty() ? nullptr : &request_.tensors[index];
    const Tensor* const out = request_.out.empty() ? nullptr : &request_.out[index];
    if (source != nullptr) views.check_dense(*source);
    if (out != nullptr) views.check_dense(*out);
    const Tensor& given = source != nullptr ? *source : *out;
    const Counts shape = source != nullptr ? result_shape(index, *source) : Counts();
    if (source == nullptr && !request_.send.empty() &&
        (out->dim() == 0 || out->size(0) != request_.send[request_.rank])) {
      throw make_error(-1, "counts has ", request_.send[request_.rank], " for this rank; out has the shape ",
                       list_text(out->sizes()));
    }
    if (out != nullptr) {
      if (source != nullptr && writes()) check_out(index, *out, shape, *source);
      if (!out->is_contiguous()) throw make_error(-1, "out: tensor ", index, " is not contiguous");
      results.push_back(*out);
    } else {
      results.push_back(new_result(given, writes() ? shape : Counts{0}));
    }
    const void* read = nullptr;
    void* const written = writes() ? results.back().mutable_data_ptr() : nullptr;
    if (reads()) {
      keep_.push_back(source->is_contiguous() ? *source : ::torch::stable::contiguous(*source));
      read = keep_.back().const_data_ptr();
    } else if (kind_.same_shape()) {
      read = written;  // the core wants both pointers of a broadcast
    }
    keep_.push_back(results.back());
    const Blocks held = source != nullptr ? kind_.in : kind_.out;
    const auto length = static_cast<std::size_t>(given.numel() / (held == Blocks::kPerRank ? request_.size : 1));
    if (request_.send.empty()) return views.add_block(given, read, written, length, block_shape(given, held));
    const auto sizes = given.sizes();
    views.add_block(given, read, written, length, Counts(sizes.begin(), sizes.end()));
    int64_t row = 1;
    for (int64_t axis = 1; axis < given.dim(); ++axis) row *= given.size(axis);
    const auto scaled = [row](const Counts& counts) {
      std::vector<std::size_t> lengths;
      for (const int64_t extent : counts) lengths.push_back(static_cast<std::size_t>(extent * row));
      return lengths;
    };
    send_ = scaled(request_.send);
    receive_ = scaled(request_.receive);
  }

  const Kind& kind_;
  const Request request_;
  const std::string no_labels_;
  int32_t reduce_ = 0;
  Tensors keep_;
  std::vector<std::size_t> send_;
  std::vector<std::size_t> receive_;
};

// The ops of a collective.
template <const Kind& kKind>
struct Ops {
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

template <const Kind&... kKinds>
struct Table {
  static void define(StableLibrary& library) { (Ops<kKinds>::define(library), ...); }
  static void implement(StableLibrary& library) { (Ops<kKinds>::implement(library), ...); }
};

using All = Table<kAllreduce, kBroadcast, kReduce, kAllGather, kGather, kScatter, kReduceScatter, kAllToAll>;

int32_t find_group(uint64_t group, int32_t* rank, int32_t* size) {
  try {
    *rank = group_rank(group);
    *size = group_size(group);
    return 0;
  } catch (const rust::Error&) {
    return -1;
  }
}

}  // namespace
}  // namespace dl_comm::torch_ops

// Stores this process's rank in a group, and the number of its ranks. Returns 0, or -1 if there is no such group. For
// the fake kernels: not an op, because tracing replaces ops.
extern "C" __attribute__((visibility("default"))) int32_t dl_comm_ops_group(uint64_t group, int32_t* rank,
                                                                            int32_t* size) {
  return dl_comm::torch_ops::find_group(group, rank, size);
}

STABLE_TORCH_LIBRARY_FRAGMENT(dl_comm, library) { dl_comm::torch_ops::All::define(library); }

STABLE_TORCH_LIBRARY_IMPL(dl_comm, CompositeExplicitAutograd, library) { dl_comm::torch_ops::All::implement(library); }
