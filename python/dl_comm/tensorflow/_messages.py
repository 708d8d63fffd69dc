"""Send and receive between two ranks, as an op.

Thread rule: any thread may call everything.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from dl_comm._arrays.arguments import checked_rank, checked_tag
from dl_comm._arrays.groups import Group, given
from dl_comm._arrays.work import Status
from dl_comm._base.checks import checked_name, checked_root, seconds
from dl_comm._base.made import Variant
from dl_comm._base.table import Send
from dl_comm.tensorflow import _ops
from dl_comm.tensorflow._collectives import converted
from dl_comm.tensorflow._ops import no_autograph, op_of


@op_of(
    Send,
    Variant(
        without=("async_op",),
        library="tf",
        returns="Nothing; in a graph, the operation that sends.",
        note="In a ``tf.function`` later calls wait for earlier ones: exchange long messages by ``sendrecv``.",
    ),
)
def send(x: Any, dest: int, tag: int, common: tuple[Any, ...]) -> Any:
    group, name, timeout = common
    found = _message(_tensors(x), [], group, name, timeout, destination=checked_root(dest), send_tag=checked_tag(tag))
    return None if tf.executing_eagerly() else found.bytes.op


@no_autograph
def recv(
    like: Any,
    source: int | None = None,
    tag: int | None = None,
    *,
    group: Group | None = None,
    name: str | None = None,
    timeout: float | None = None,
) -> tuple[Any, Status]:
    """Receive a message.

    Args:
        like: A tensor or a list of tensors of the types and shapes to receive. A shorter message leaves the rest of
            their values; a longer one is an error.
        source: The sender; None: any rank of the group.
        tag: The tag of the message; None: any.
        group: The ranks that take part; None: all. Keep it as long as a graph uses it.
        name: Stands in error messages of this rank.
        timeout: The deadline in seconds (0: no limit), instead of the group's. Missing it does not end the group.

    Returns:
        The received tensor or list of tensors, and a `Status` of tensors: source, tag and length in bytes. They have no
        gradient: asking for it raises LookupError.
    """
    return _received(like, _message([], _tensors(like), group, name, timeout, **_from(source, tag)))


@no_autograph
def sendrecv(
    x: Any,
    dest: int,
    like: Any,
    source: int | None = None,
    *,
    send_tag: int = 0,
    recv_tag: int | None = None,
    group: Group | None = None,
    name: str | None = None,
    timeout: float | None = None,
) -> tuple[Any, Status]:
    """Send `x` to rank `dest` and receive tensors like `like` at the same time; see `send` and `recv`."""
    # A send that is refused must not leave the receive behind.
    to = {"destination": checked_rank(dest, given(group), "dest"), "send_tag": checked_tag(send_tag)}
    message = _message(_tensors(x), _tensors(like), group, name, timeout, **to, **_from(source, recv_tag))
    return _received(like, message)


def _tensors(x: Any) -> list[tf.Tensor]:
    return [converted(value) for value in (_ops.listed(x) if isinstance(x, (list, tuple)) else [x])]


def _from(source: int | None, tag: int | None) -> dict[str, int]:
    return {"source": -1 if source is None else checked_root(source), "receive_tag": checked_tag(tag)}


def _message(
    sent: list[tf.Tensor],
    like: list[tf.Tensor],
    group: Group | None,
    name: str | None,
    timeout: float | None,
    *,
    destination: int = 0,
    send_tag: int = 0,
    source: int = -1,
    receive_tag: int = -1,
) -> Any:
    checked_name(name)
    _ops.refuse_xla()
    number, limit = _ops.number_of(group), seconds(timeout)
    text = _ops.settings(name or "", "", destination, send_tag, source, receive_tag, number, limit)
    return _ops.run("dl_comm_message", sent, like, text, on_host=True)


def _received(like: Any, message: Any) -> tuple[Any, Status]:
    tensors = list(message.received)
    status = Status(message.source_rank, message.message_tag, message.bytes)
    return (tensors if isinstance(like, (list, tuple)) else tensors[0]), status


def _no_gradient(op: Any, *upstream: Any) -> list[Any]:
    del op, upstream
    raise LookupError("dl_comm: a received message has no gradient; use all_to_all, which has one, or tf.stop_gradient")


tf.RegisterGradient("DlCommMessage")(_no_gradient)
