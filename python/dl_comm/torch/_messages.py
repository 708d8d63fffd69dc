"""Send and receive of torch tensors. Messages of GPU tensors go through host memory.

Thread rule: any thread may call every function; they wait without the GIL.
"""

from __future__ import annotations

from typing import Any

import torch

from dl_comm._arrays.work import Status
from dl_comm._base.checks import checked_flag, seconds
from dl_comm._base.errors import ArgumentError
from dl_comm._base.made import Variant, made
from dl_comm._base.table import Recv, Send, SendRecv
from dl_comm.torch import _ops
from dl_comm.torch._arguments import call_name, carried, checked_rank, checked_tag, place, refuse_gradients, tensors_of
from dl_comm.torch._work import Handle, Work

_ANY = -1
_SEND, _RECEIVE = _ops.ops.send_start.default, _ops.ops.recv_start.default


_NOTE = Variant(note="Not differentiable. Messages of GPU tensors go through host memory.", library="torch")


@made(Send, _NOTE)
def send(x: Any, dest: int, tag: int, common: tuple[Any, ...]) -> Any:
    group, name, timeout, async_op = common
    checked_flag("async_op", async_op)
    tensors, _ = tensors_of(x)
    refuse_gradients(tensors, "send")
    tensors, _ = carried(tensors)
    arguments = (place(group)[0], checked_rank(dest, "dest"), checked_tag(tag), call_name(name), seconds(timeout))
    copies = [tensor if _on_host(tensor) else tensor.cpu() for tensor in tensors]
    work: Work[None] = Work(_ops.call(_SEND, copies, *arguments), lambda _: None)
    return work if async_op else work.wait()


@made(Recv, _NOTE)
def recv(out: Any, source: int | None, tag: int | None, common: tuple[Any, ...]) -> Any:
    group, name, timeout, async_op = common
    checked_flag("async_op", async_op)
    tensors, _ = tensors_of(out, "out")
    refuse_gradients(tensors, "recv")
    peer = _ANY if source is None else checked_rank(source, "source")
    arguments = (place(group)[0], peer, _ANY if tag is None else checked_tag(tag), call_name(name), seconds(timeout))
    tensors, _ = carried(tensors)
    copies = [tensor if _on_host(tensor) else _host_copy(tensor) for tensor in tensors]
    copied = False

    def ended(handle: Handle) -> Status:
        nonlocal copied
        status = Status(*handle.status())
        if not copied:
            _upload(tensors, copies, status.bytes)
        copied = True
        return status

    work = Work(_ops.call(_RECEIVE, copies, *arguments), ended)
    torch.autograd.graph.increment_version(tensors)
    return work if async_op else work.wait()


def _on_host(tensor: torch.Tensor) -> bool:
    if tensor.is_meta:
        raise ArgumentError("a tensor is on the meta device and has no values")
    return tensor.device.type == "cpu"


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return memory for what a tensor receives."""
    if not tensor.is_contiguous():
        raise ArgumentError("out is not contiguous: receive into a contiguous tensor")
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _upload(tensors: list[torch.Tensor], copies: list[torch.Tensor], received: int) -> None:
    """Copy the first `received` bytes of the copies to their tensors."""
    with torch.no_grad():
        for tensor, copy in zip(tensors, copies, strict=True):
            length = min(tensor.nbytes, received)
            received -= length
            if copy is not tensor and length:
                tensor.view(-1).view(torch.uint8)[:length].copy_(copy.view(-1).view(torch.uint8)[:length])


@made(SendRecv, _NOTE)
def sendrecv(
    x: Any,
    dest: int,
    out: Any,
    source: int | None,
    send_tag: int,
    recv_tag: int | None,
    common: tuple[Any, ...],
) -> Any:
    group, name, timeout = common
    # The receive must not stay behind if the send is refused.
    tensors, _ = tensors_of(x)
    refuse_gradients(tensors, "send")
    size = place(group)[2]
    if checked_rank(dest, "dest") >= size:
        raise ArgumentError(f"sendrecv sends to a rank of the group, 0 to {size - 1}, not to {dest}")
    checked_tag(send_tag)
    received = recv(out, source, recv_tag, group=group, name=name, timeout=timeout, async_op=True)
    send(x, dest, send_tag, group=group, name=name, timeout=timeout)
    return received.wait()
