"""Horovod for ``tf.keras``, on dl_comm.

    import horovod.tensorflow.keras as hvd

    hvd.init()
    model.compile(hvd.DistributedOptimizer(optimizer), loss=...)
    model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()])

That is Keras 3, or ``tf_keras`` with ``TF_USE_LEGACY_KERAS=1``.

Raises ValueError for a wrong argument, and what the collectives of `horovod.tensorflow` or `horovod.torch` raise.
Thread rule: as Keras, one thread trains a model.
"""

from __future__ import annotations

from typing import Any

from horovod import keras as _keras
from horovod._keras import unconverted
from horovod.common._names import ProcessSet, global_process_set
from horovod.keras import *  # noqa: F403 (its __all__)
from horovod.keras import Average, Compression

__all__ = [*_keras.__all__]


@unconverted  # type: ignore[no-redef]
def DistributedOptimizer(  # noqa: N802 (a class to those who call it)
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
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """As ``horovod.keras.DistributedOptimizer``, with its last arguments in another order."""
    return _keras.DistributedOptimizer(**locals())
