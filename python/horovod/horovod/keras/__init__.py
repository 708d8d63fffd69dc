"""Horovod for Keras, on dl_comm.

    import horovod.keras as hvd

    hvd.init()
    model.compile(hvd.DistributedOptimizer(optimizer), loss=...)
    model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()])

With Keras 3 on TensorFlow or torch (``KERAS_BACKEND``), or ``tf_keras`` with ``TF_USE_LEGACY_KERAS=1``.

Raises ValueError for a wrong argument, and what the collectives of `horovod.tensorflow` or `horovod.torch` raise.
Thread rule: as Keras, one thread trains a model.
"""

from __future__ import annotations

from typing import Any

from horovod import _keras as _shared
from horovod.common import _names
from horovod.common._arguments import takes
from horovod.common._names import *  # noqa: F403 (its __all__)
from horovod.common._names import Average
from horovod.common.basics import HorovodBasics
from horovod.keras import callbacks, elastic

Compression: Any
if _shared._is_on_torch():
    from horovod.torch.compression import Compression
else:
    from horovod.tensorflow.compression import Compression

_basics = HorovodBasics(__file__, "tensorflow")

__all__ = [*_names.__all__, "Compression", "DistributedOptimizer", "PartialDistributedOptimizer", "allgather"]
__all__ += ["allreduce", "broadcast", "broadcast_global_variables", "callbacks", "elastic", "load_model"]
__all__ += ["reducescatter"]

_FIRST = "optimizer name device_dense device_sparse compression sparse_as_dense gradient_predivide_factor op"
_PASSES = "backward_passes_per_step average_aggregated_gradients"
_GROUPS = "num_groups groups"
_LAST = "process_set scale_local_gradients"


_ORDER = f"{_FIRST} {_GROUPS} {_PASSES} {_LAST}"
_ORDER_OF_TF_KERAS = f"{_FIRST} {_PASSES} {_GROUPS} {_LAST}"
"""That of `horovod.tensorflow.keras`."""

DistributedOptimizer = _shared.unconverted(
    takes(_ORDER, "DistributedOptimizer", op=Average)(_shared.distributed_optimizer)
)


@_shared.unconverted
@takes(f"{_FIRST} {_PASSES} groups process_set local_layers scale_local_gradients", op=Average)
def PartialDistributedOptimizer(local_layers: Any, **options: Any) -> Any:  # noqa: N802 (a class to callers)
    """As ``DistributedOptimizer``, but leaves the gradients of some layers to each rank.

    The arguments are those of ``DistributedOptimizer``; ``local_layers`` is a Keras layer, or several.

    Raises:
        ValueError: They are no layers, or options do not fit each other.
    """
    variables, found = _shared.local_variables(local_layers), _shared.distributed_optimizer(**options)
    for variable in variables:
        found.register_local_var(variable)
    return found


def broadcast_global_variables(root_rank: int) -> None:
    """Broadcasts all global variables of a TF1 graph, in Keras's session.

    Raises RuntimeError in eager mode, which has no list of them.
    """
    import tensorflow as tf

    from horovod.tensorflow import broadcast_global_variables as operation

    tf.compat.v1.keras.backend.get_session().run(operation(root_rank))


@takes("value name average prescale_factor postscale_factor op compression")
def allreduce(value: Any, **options: Any) -> Any:
    """Returns the reduction of what Keras's backend takes as a tensor: ``Average``, unless ``op`` says another.

    ``average``: deprecated, True for Average, False for Sum. The factors multiply the input and the result.
    """
    return _shared.collective("allreduce", value, **options)


def allgather(value: Any, name: str | None = None) -> Any:
    """Returns the values of all ranks, joined along the first axis."""
    return _shared.collective("allgather", value, name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Returns the value of one rank."""
    return _shared.collective("broadcast", value, root_rank=root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """Returns this rank's rows of the sum or average of the values."""
    return _shared.collective("reducescatter", value, name=name, op=op)


@takes("filepath custom_optimizers=None custom_objects=None compression legacy_opts=False")
def load_model(filepath: Any, custom_optimizers: Any, custom_objects: Any, compression: Any, legacy_opts: bool) -> Any:
    """Loads a saved model of which the optimizer becomes a ``DistributedOptimizer``, with its state.

    Args:
        filepath: Every rank must be able to read it.
        custom_optimizers: Classes of optimizers that Keras does not know.
        custom_objects: Further objects, by their names.
        compression: How the values travel.
        legacy_opts: Not used.
    """
    custom = {each.__name__: each for each in custom_optimizers or ()} | (custom_objects or {})
    return _shared.load_model(lambda found: DistributedOptimizer(found, compression=compression), filepath, custom)
