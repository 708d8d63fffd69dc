// A call of the core, described from torch tensors.
#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <utility>
#include <vector>

#include "dl_comm.h"

namespace dl_comm::c10d_backend {

// Throws c10::DistBackendError "dl_comm error <code>: <message>".
[[noreturn]] void throw_error(int code, const std::string& message);

// Throws the calling thread's last error of the core unless `code` is at least 0.
void check(int code);

// Throws c10::ValueError for arguments of the script.
[[noreturn]] void throw_invalid(const std::string& message);

// Checks that all elements lie in one piece of memory without gaps, on the CPU or a CUDA device. `what` names the
// tensor in the message.
void check_dense(const at::Tensor& tensor, const char* what);

// A collective or a message: what the core gets, the tensors that must live until it has ended, and what remains to be
// done with them afterwards.
//
// Thread rule: one thread at a time.
class Call {
 public:
  // `name` is that of torch.distributed's function, for messages and the profiler. `moves`: the collective copies
  // elements, so that every type may be sent, as bytes where the core has no such type.
  Call(int collective, const char* name, bool moves);

  // Sets the operator. A sum of bool is "or", as in torch; the factor of PREMUL_SUM multiplies every input.
  void set_reduce(const ::c10d::ReduceOp& op, at::ScalarType type);

  // Adds a tensor: reads blocks from `src` and writes blocks to `dst`, which may be undefined where this rank reads or
  // writes nothing. `block` has the shape of one block, by which the ranks' calls are compared; it may be a temporary.
  void add(const at::Tensor& src, const at::Tensor& dst, const at::Tensor& block);

  // As above for blocks of `length` elements whose shapes need not be equal.
  void add(const at::Tensor& src, const at::Tensor& dst, std::size_t length);

  // Adds to the name that this rank has refused its arguments.
  void refuse(const std::string& why);

  // What the core gets; valid until this object changes.
  dl_comm_call_t describe(double timeout);

  // The tensors that are read or written.
  std::vector<at::Tensor> tensors;
  // What Work.result() returns, and, as lists, the value of the Future.
  std::vector<at::Tensor> outputs;
  std::vector<std::vector<at::Tensor>> output_lists;
  // Runs after the call has succeeded, before its outputs are used: copies to where the caller wants them.
  std::function<void()> finish;

  int root = 0;
  std::vector<std::size_t> send_counts;
  std::vector<std::size_t> receive_counts;
  std::vector<dl_comm_buffer_t> buffers;
  // What this call is, as the profiler shows it: "dl_comm:all_reduce".
  const char* const title;

  // The device of all tensors.
  at::Device device() const { return device_; }

 private:
  void add_buffer(const at::Tensor& src, const at::Tensor& dst, const at::Tensor& of, std::size_t length,
                  at::IntArrayRef shape);
  void keep(const at::Tensor& tensor);

  const int collective_;
  const bool moves_;
  int reduce_ = DL_COMM_SUM;
  double prescale_ = 1;
  std::string name_;
  // Hold the shapes that `buffers` point to.
  std::vector<at::Tensor> blocks_;
  at::Device device_ = at::kCPU;
  bool has_device_ = false;
};

// The name of the function without the prefix of the profiler.
const char* function_name(const char* title);

}  // namespace dl_comm::c10d_backend
