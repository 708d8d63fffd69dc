"""Messages of NumPy arrays between two ranks of a group. Tensors of a framework go to its binding.

Thread rule: any thread may call every function.
"""

from __future__ import annotations

from typing import Any

from dl_comm._arrays.arguments import arrays_of, checked_rank, checked_source, checked_tag
from dl_comm._arrays.cuda_arrays import in_core
from dl_comm._arrays.groups import given
from dl_comm._arrays.work import Status, Work, limit
from dl_comm._base.checks import checked_flag, checked_name
from dl_comm._base.made import made
from dl_comm._base.table import Recv, Send, SendRecv


def _sent(x: Any) -> Any:
    return in_core(arrays_of(x)[0], None)[0]


def _received(out: Any) -> Any:
    return in_core(None, arrays_of(out, "out")[0])[1]


@made(Send)
def send(x: Any, dest: int, tag: int, common: tuple[Any, ...]) -> Any:
    group, name, timeout, async_op = common
    members = given(group)
    checked_name(name)
    message = (_sent(x), checked_rank(dest, members, "dest"), checked_tag(tag), name, limit(timeout))
    if checked_flag("async_op", async_op):
        return Work(members.handle.send(message), lambda _: None)
    members.handle.send_receive(message, None)
    return None


@made(Recv)
def recv(out: Any, source: int | None, tag: int | None, common: tuple[Any, ...]) -> Any:
    group, name, timeout, async_op = common
    members = given(group)
    checked_name(name)
    message = (_received(out), checked_source(source, members), checked_tag(tag), name, limit(timeout))
    if checked_flag("async_op", async_op):
        return Work(members.handle.receive(message), lambda handle: Status(*handle.status()))
    return Status(*members.handle.send_receive(None, message))


@made(SendRecv)
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
    checked_name(name)
    members, seconds = given(group), limit(timeout)
    sent = (_sent(x), checked_rank(dest, members, "dest"), checked_tag(send_tag), name, seconds)
    received = (_received(out), checked_source(source, members), checked_tag(recv_tag), name, seconds)
    return Status(*members.handle.send_receive(sent, received))
