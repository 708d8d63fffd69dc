"""Send and receive of torch tensors, in host memory or on a GPU.

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
from dl_comm.torch._work import Work

_ANY = -1
_SEND, _RECEIVE = _ops.ops.send_start.default, _ops.ops.recv_start.default


_NOTE = Variant(note="Not differentiable.", library="torch")


@made(Send, _NOTE)
def send(x: Any, dest: int, tag: int, common: tuple[Any, ...]) -> Any:
    group, name, timeout, async_op = common
    checked_flag("async_op", async_op)
    tensors, _ = tensors_of(x)
    refuse_gradients(tensors, "send")
    tensors, _ = carried(tensors)
    arguments = (place(group)[0], checked_rank(dest, "dest"), checked_tag(tag), call_name(name), seconds(timeout))
    work: Work[None] = Work(_ops.call(_SEND, tensors, *arguments), lambda _: None)
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
    work = Work(_ops.call(_RECEIVE, tensors, *arguments), lambda handle: Status(*handle.status()))
    torch.autograd.graph.increment_version(tensors)
    return work if async_op else work.wait()


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
