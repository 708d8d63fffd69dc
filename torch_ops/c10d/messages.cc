// Send and receive. When a message has ended, its GPU is done with it, so no stream need wait for it.
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include <memory>
#include <optional>

#include "backend.h"
#include "lists.h"

namespace dl_comm::c10d_backend {

using OpType = ::c10d::OpType;

WorkPtr Backend::transfer(at::Tensor tensor, int peer, int tag, OpType type) {
  const auto group = this->group();
  const bool sends = type == OpType::SEND;
  Call call(0, sends ? "dl_comm:send" : "dl_comm:recv", true);
  std::optional<c10::Stream> stream;
  if (tensor.is_cuda()) stream = current_stream(tensor.device());
  auto memory = tensor.detach();
  if (sends) {
    memory = memory.contiguous();
  } else if (!tensor.is_contiguous()) {
    memory = at::empty(tensor.sizes(), tensor.options().requires_grad(false));
    // After the work that uses the tensor now, also on a thread with another stream.
    call.finish = [tensor, memory, stream] {
      c10::OptionalStreamGuard guard;
      if (stream) guard.reset_stream(*stream);
      tensor.detach().copy_(memory);
      guard.reset();
      if (stream) order(*stream, current_stream(tensor.device()));
    };
  }
  if (sends)
    call.add(memory, at::Tensor(), memory);
  else
    call.add(at::Tensor(), memory, memory);
  call.outputs = {tensor};
  auto state = std::make_shared<CallState>(std::move(call), std::nullopt, failure_);
  auto work = c10::make_intrusive<CallWork>(getRank(), type, 0, state);
  dl_comm_message_t message{};
  message.size = sizeof message;
  message.buffers = state->call.buffers.data();
  message.count = state->call.buffers.size();
  message.peer = peer;
  message.tag = tag;
  message.name = function_name(state->call.title);
  message.timeout = seconds(::c10d::kUnsetTimeout);
  message.exact = 1;
  dl_comm_device_t device{};
  if (stream) {
    device = core_device(*stream);
    message.device = &device;
  }
  CallState::start(state, group.get(), message, sends ? dl_comm_send : dl_comm_receive);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (coalescing_ == std::this_thread::get_id()) coalesced_.push_back(work);
  return work;
}

WorkPtr Backend::send(Tensors& tensors, int peer, int tag) {
  check_rank(peer);
  return transfer(only(tensors, "send"), peer, tag, OpType::SEND);
}

WorkPtr Backend::recv(Tensors& tensors, int peer, int tag) {
  check_rank(peer);
  return transfer(only(tensors, "recv"), peer, tag, OpType::RECV);
}

WorkPtr Backend::recvAnysource(Tensors& tensors, int tag) {
  return transfer(only(tensors, "recv"), DL_COMM_ANY_SOURCE, tag, OpType::RECVANYSOURCE);
}

}  // namespace dl_comm::c10d_backend
