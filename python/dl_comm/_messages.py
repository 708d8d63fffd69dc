"""Messages of NumPy arrays between two ranks of a group. Tensors of a framework go to its binding.

Thread rule: any thread may call every function.
"""

from __future__ import annotations

from typing import Any

from dl_comm._arguments import arrays_of, checked_rank, checked_source, checked_tag
from dl_comm._checks import checked_flag, checked_name
from dl_comm._groups import Group, given
from dl_comm._work import Status, Work, limit


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
    """Sends arrays to rank ``dest`` of the group.

    Args:
        x: An array, a number, or a list of arrays, which are one message.
        dest: The receiver.
        tag: A number from 0 that the receiver may ask for.
        group: As for ``allreduce``.
        name: Stands in error messages of this rank.
        timeout: As for ``allreduce``. A message that misses its deadline does not end the group.
        async_op: Return a ``Work`` at once.

    Short messages do not wait for the receiver; longer ones until it has them.
    """
    members = given(group)
    checked_name(name)
    message = (arrays_of(x)[0], checked_rank(dest, members, "dest"), checked_tag(tag), name, limit(timeout))
    if checked_flag("async_op", async_op):
        return Work(members.handle.send(message), lambda _: None)
    members.handle.send_receive(message, None)
    return None


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
    """Receives a message into arrays.

    Args:
        out: An array or a list of arrays. A shorter message leaves the rest as it is; a longer one is an error.
        source: The sender; None: any rank of the group.
        tag: The tag of the message; None: any.
        group: As for ``allreduce``.
        name: Stands in error messages of this rank.
        timeout: As for ``allreduce``. A receive that misses its deadline does not end the group.
        async_op: Return a ``Work`` of the status at once.

    Returns:
        A ``Status``: source, tag and length in bytes.
    """
    members = given(group)
    checked_name(name)
    message = (arrays_of(out, "out")[0], checked_source(source, members), checked_tag(tag), name, limit(timeout))
    if checked_flag("async_op", async_op):
        return Work(members.handle.receive(message), lambda handle: Status(*handle.status()))
    return Status(*members.handle.send_receive(None, message))


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
    """Sends ``x`` to rank ``dest`` and receives into ``out`` at the same time; see ``send`` and ``recv``."""
    checked_name(name)
    members, seconds = given(group), limit(timeout)
    sent = (arrays_of(x)[0], checked_rank(dest, members, "dest"), checked_tag(send_tag), name, seconds)
    received = (arrays_of(out, "out")[0], checked_source(source, members), checked_tag(recv_tag), name, seconds)
    return Status(*members.handle.send_receive(sent, received))
