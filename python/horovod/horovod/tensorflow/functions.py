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
from horovod.common._arguments import takes
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


broadcast_object = takes("obj=None root_rank=0 session name process_set")(_objects.broadcast_object)
allgather_object = takes("obj session name process_set")(_objects.allgather_object)


@takes("root_rank=0 session name process_set")
def broadcast_object_fn(**options: Any) -> Callable[[Any], Any]:
    """Returns a function that broadcasts its argument, as ``broadcast_object``."""
    return lambda obj: broadcast_object(obj, **options)
