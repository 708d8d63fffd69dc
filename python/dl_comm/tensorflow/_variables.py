"""Broadcast of variables from one rank: as a function, and as a hook of a TF1 session.

Thread rule: as TensorFlow's for assigning variables; all ranks make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from dl_comm._arrays.groups import Group
from dl_comm._job.start import ensure_initialized
from dl_comm.tensorflow import _ops


@_ops.no_autograph
def broadcast_variables(
    variables: Iterable[Any], root: int = 0, *, name: str | None = None, group: Group | None = None
) -> tf.Operation | None:
    """Assign to every variable its value on rank `root`.

    Args:
        variables: `tf.Variable` or Keras variables, of the same names, types and shapes on all ranks, in any order. The
            numbers that Keras gives to layers in each process may differ.
        root: The rank that has the values.
        name: A name that must be the same on all ranks.
        group: The ranks that take part; `root` is a rank of the group. None: all.

    Returns:
        None in eager mode; in a graph, the operation that assigns the variables.

    Raises what `dl_comm.tensorflow.broadcast` raises.
    """
    owned = _ops.listed(variables)
    values = _ops.broadcast_new(owned, root, name or "broadcast_variables", group=group)
    assigned = [variable.assign(value) for variable, value in zip(owned, values, strict=True)]
    return None if tf.executing_eagerly() else tf.group(*assigned)


class BroadcastHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Broadcasts all global variables from rank `root` after a session has initialized or restored them.

    For `tf.compat.v1.train.MonitoredTrainingSession(hooks=[BroadcastHook()])`: only the root needs a checkpoint. Every
    rank must have the hook, and the same variables in the graph. Calls `dl_comm.init()` if needed. Creating the session
    raises errors of the broadcast as `tf.errors`; see `dl_comm.error_of`.
    """

    def __init__(self, root: int = 0, *, group: Group | None = None) -> None:
        """Store the root, a rank of `group` if there is one; `begin` adds the ops to the graph."""
        self._root, self._group = root, group
        self._broadcast: tf.Operation | None = None

    def begin(self) -> None:
        """Add the broadcast to the default graph; MonitoredSession calls this before it finalizes the graph."""
        variables = tf.compat.v1.global_variables()
        graph = tf.compat.v1.get_default_graph()
        if self._broadcast is not None and self._broadcast.graph is graph:
            return
        self._broadcast = (
            broadcast_variables(variables, self._root, name="BroadcastHook", group=self._group) if variables else None
        )

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        """Broadcast; MonitoredSession calls this when the variables have their values."""
        del coord
        ensure_initialized()
        if self._broadcast is not None:
            session.run(self._broadcast)
