"""Broadcast of variables and objects.

    hvd.broadcast_variables(model.variables, root_rank=0)
    settings = hvd.broadcast_object(settings, root_rank=0)
    of_all = hvd.allgather_object(hvd.rank())

All are collective. Objects are pickled by cloudpickle; unpickle only what you trust. They raise HorovodInternalError
where the ranks differ, and ValueError before ``init`` or for a wrong argument.

Thread rule: any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from horovod.common import _objects
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow.mpi_ops import broadcast_


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> tf.Operation | None:
    """Replaces the values of variables by those of one rank, in one call.

    Args:
        variables: Those of TensorFlow or Keras, of the same shapes and types on all ranks, in the same order.
        root_rank: The rank that has the values: of the job, also in a process set.
        process_set: The ranks.
        inplace: Not used.

    Returns:
        None; in a graph, the operation that assigns the variables.

    Raises what ``broadcast`` raises.
    """
    values = broadcast_(list(variables), root_rank, "broadcast_variables", process_set)
    return None if tf.executing_eagerly() else tf.group(*values)


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the object of one rank.

    Args:
        obj: Any object that cloudpickle takes; used on the root only.
        root_rank: The rank that has it: of the job, also in a process set.
        session: Not used.
        name: Not used.
        process_set: The ranks.
    """
    return _objects.broadcast_object(obj, root_rank, process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """Returns a function that broadcasts its argument, as ``broadcast_object``."""
    return lambda obj: _objects.broadcast_object(obj, root_rank, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Returns the objects of all ranks, in their order.

    Args:
        obj: Any object that cloudpickle takes.
        session: Not used.
        name: Not used.
        process_set: The ranks.
    """
    return _objects.allgather_object(obj, process_set)
