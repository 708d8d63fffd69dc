"""Send and receive of torch tensors in host memory, as the functions of `dl_comm` for NumPy arrays.

Thread rule: any thread may call every function; they wait without the GIL.
"""

from __future__ import annotations

from typing import Any

import torch

from dl_comm import ArgumentError, Group, Status
from dl_comm._process import seconds
from dl_comm.torch import _ops
from dl_comm.torch._arguments import call_name, checked_rank, checked_tag, place, refuse_gradients, tensors_of
from dl_comm.torch._work import Work

_ANY = -1
_SEND, _RECEIVE = _ops.ops.send_start.default, _ops.ops.recv_start.default


def send(
    x: Any,
    dest: int,
    tag: int = 0,
    *,
    group: Group | None = None,
    name: str | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Send tensors in host memory to rank `dest` of the group. Not differentiable.

    Args:
        x: A tensor or a list of tensors, which are one message.
        dest: The receiver.
        tag: A number from 0 that the receiver may ask for.
        group: As for `allreduce`.
        name: Stands in error messages of this rank.
        timeout: As for `allreduce`. A message that misses its deadline does not end the group.
        async_op: Return a `Work` at once.

    Short messages do not wait for the receiver; longer ones until it has them.
    """
    tensors, _ = tensors_of(x)
    refuse_gradients(tensors, "send")
    arguments = (place(group)[0], checked_rank(dest, "dest"), checked_tag(tag), call_name(name), seconds(timeout))
    work: Work[None] = Work(_ops.call(_SEND, tensors, *arguments), lambda _: None)
    return work if async_op else work.wait()


def recv(
    out: Any,
    source: int | None = None,
    tag: int | None = None,
    *,
    group: Group | None = None,
    name: str | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Receive a message into tensors in host memory.

    Args:
        out: A contiguous tensor or a list of them. A shorter message leaves the rest as it is; a longer one is an
            error.
        source: The sender; None: any rank of the group.
        tag: The tag of the message; None: any.
        group: As for `allreduce`.
        name: Stands in error messages of this rank.
        timeout: As for `allreduce`. A receive that misses its deadline does not end the group.
        async_op: Return a `Work` of the status at once.

    Returns:
        A `Status`: source, tag and length in bytes.
    """
    tensors, _ = tensors_of(out, "out")
    refuse_gradients(tensors, "recv")
    peer = _ANY if source is None else checked_rank(source, "source")
    arguments = (place(group)[0], peer, _ANY if tag is None else checked_tag(tag), call_name(name), seconds(timeout))
    work = Work(_ops.call(_RECEIVE, tensors, *arguments), lambda handle: Status(*handle.status()))
    torch.autograd.graph.increment_version(tensors)
    return work if async_op else work.wait()


def sendrecv(
    x: Any,
    dest: int,
    out: Any,
    source: int | None = None,
    *,
    send_tag: int = 0,
    recv_tag: int | None = None,
    group: Group | None = None,
    name: str | None = None,
    timeout: float | None = None,
) -> Status:
    """Send `x` to rank `dest` and receive into `out` at the same time; see `send` and `recv`."""
    # The receive must not stay behind if the send is refused.
    tensors, _ = tensors_of(x)
    refuse_gradients(tensors, "send")
    size = place(group)[2]
    if checked_rank(dest, "dest") >= size or any(tensor.device.type != "cpu" for tensor in tensors):
        raise ArgumentError(f"sendrecv sends tensors in host memory to a rank of the group, 0 to {size - 1}")
    checked_tag(send_tag)
    received = recv(out, source, recv_tag, group=group, name=name, timeout=timeout, async_op=True)
    send(x, dest, send_tag, group=group, name=name, timeout=timeout)
    status: Status = received.wait()
    return status
