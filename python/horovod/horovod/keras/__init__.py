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
from horovod.common._names import *  # noqa: F403 (its __all__)
from horovod.common._names import ProcessSet, global_process_set
from horovod.common.basics import HorovodBasics
from horovod.keras import callbacks, elastic

Compression: Any
if _shared._is_on_torch():
    from horovod.torch.compression import Compression
else:
    from horovod.tensorflow.compression import Compression

_basics = HorovodBasics(__file__, "tensorflow")
Average, Sum, Adasum = range(3)

__all__ = [
    *_names.__all__,
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "Sum",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "elastic",
    "load_model",
    "reducescatter",
]


@_shared.unconverted
def DistributedOptimizer(  # noqa: N802 (a class to those who call it)
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    num_groups: int = 0,
    groups: Any = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Makes an optimizer reduce its gradients over the ranks before it applies them, and returns it.

    Args:
        optimizer: One of Keras 3 or ``tf_keras``.
        name: What the ranks match; the same on all ranks.
        device_dense: Where the ops of tensors run.
        device_sparse: Where those of ``tf.IndexedSlices`` run.
        compression: How the values travel.
        sparse_as_dense: Whether ``tf.IndexedSlices`` become tensors first.
        gradient_predivide_factor: The part of the division of an average that comes before the sum.
        op: ``Average`` or ``Sum``.
        num_groups: Deprecated: as ``groups``.
        groups: A number of groups of gradients, or lists of variables; each group is one call.
        backward_passes_per_step: Passes of which the gradients are added up on each rank first; Keras 3 has its
            ``gradient_accumulation_steps`` then.
        average_aggregated_gradients: Divide the sums of several passes by their number.
        process_set: The ranks; others keep their gradients.
        scale_local_gradients: Divide the gradients of local variables (``register_local_var``) by the number of ranks.

    Raises:
        ValueError: Another operator, or options that do not fit each other.
    """
    return _shared.distributed_optimizer(**locals())


@_shared.unconverted
def PartialDistributedOptimizer(  # noqa: N802 (a class to those who call it)
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """As ``DistributedOptimizer``, but leaves the gradients of some layers to each rank.

    The arguments are those of ``DistributedOptimizer``; ``local_layers`` is a Keras layer, or several.

    Raises:
        ValueError: They are no layers, or options do not fit each other.
    """
    options = dict(locals())
    layers = _shared.local_variables(options.pop("local_layers"))
    found = _shared.distributed_optimizer(**options)
    for variable in layers:
        found.register_local_var(variable)
    return found


def broadcast_global_variables(root_rank: int) -> None:
    """Broadcasts all global variables of a TF1 graph, in Keras's session.

    Raises RuntimeError in eager mode, which has no list of them.
    """
    import tensorflow as tf

    from horovod.tensorflow import broadcast_global_variables as operation

    tf.compat.v1.keras.backend.get_session().run(operation(root_rank))


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Returns the reduction of what Keras's backend takes as a tensor: ``Average``, unless ``op`` says another.

    ``average``: deprecated, True for Average, False for Sum. The factors multiply the input and the result.
    """
    options = {"average": average, "op": op, "prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return _shared.collective("allreduce", value, name=name, compression=compression, **options)


def allgather(value: Any, name: str | None = None) -> Any:
    """Returns the values of all ranks, joined along the first axis."""
    return _shared.collective("allgather", value, name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Returns the value of one rank."""
    return _shared.collective("broadcast", value, root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """Returns this rank's rows of the sum or average of the values."""
    return _shared.collective("reducescatter", value, name=name, op=op)


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Loads a saved model of which the optimizer becomes a ``DistributedOptimizer``, with its state.

    Args:
        filepath: Every rank must be able to read it.
        custom_optimizers: Classes of optimizers that Keras does not know.
        custom_objects: Further objects, by their names.
        compression: How the values travel.
        legacy_opts: Not used.
    """
    optimizers = {each.__name__: each for each in custom_optimizers or ()}
    custom = (optimizers, custom_objects or {})
    return _shared.load_model(lambda found: DistributedOptimizer(found, compression=compression), filepath, custom)
