"""Spreading variables from one rank: in a call, and as a hook of a TF1 session.

Thread rule: as TensorFlow's for assigning variables; all ranks call the same in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from dl_comm._process import ensure_initialized
from dl_comm.tensorflow import _ops


@_ops.no_autograph
def broadcast_variables(variables: Iterable[Any], root: int = 0, *, name: str | None = None) -> tf.Operation | None:
    """Assign to every variable its value on rank `root`.

    Args:
        variables: `tf.Variable` or Keras variables, in the same order with the same types and shapes on all ranks.
        root: The rank whose values count.
        name: What the ranks must agree on besides types and shapes.

    Returns:
        None when it runs eagerly; in a graph the operation that does it.

    Raises what `dl_comm.tensorflow.broadcast` raises.
    """
    owned = _ops.listed(variables)
    values = _ops.broadcast_new(owned, root, name or "broadcast_variables")
    assigned = [variable.assign(value) for variable, value in zip(owned, values, strict=True)]
    return None if tf.executing_eagerly() else tf.group(*assigned)


class BroadcastHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Gives all global variables the values of rank `root` once a session has initialised or restored them.

    For `tf.compat.v1.train.MonitoredTrainingSession(hooks=[BroadcastHook()])`: only the root needs a checkpoint to
    restore from. Every rank must have the hook, and the same variables in the graph. Calls `dl_comm.init()` when nobody
    has. A failure is raised where the session is made, as `tf.errors`.
    """

    def __init__(self, root: int = 0) -> None:
        """Remember whose values count; the ops are added to the graph by `begin`."""
        self._root = root
        self._broadcast: tf.Operation | None = None

    def begin(self) -> None:
        """Add the broadcast to the default graph; MonitoredSession calls it before it finalises the graph."""
        variables = tf.compat.v1.global_variables()
        graph = tf.compat.v1.get_default_graph()
        if self._broadcast is not None and self._broadcast.graph is graph:
            return
        self._broadcast = broadcast_variables(variables, self._root, name="BroadcastHook") if variables else None

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        """Broadcast; MonitoredSession calls it when the variables have their values."""
        del coord
        ensure_initialized()
        if self._broadcast is not None:
            session.run(self._broadcast)
