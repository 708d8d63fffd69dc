"""Horovod for ``tf.keras``, on dl_comm.

    import horovod.tensorflow.keras as hvd

    hvd.init()
    model.compile(hvd.DistributedOptimizer(optimizer), loss=...)
    model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()])

That is Keras 3, or ``tf_keras`` with ``TF_USE_LEGACY_KERAS=1``.

Raises ValueError for a wrong argument, and what the collectives of `horovod.tensorflow` or `horovod.torch` raise.
Thread rule: as Keras, one thread trains a model.
"""

from horovod import _keras as _shared
from horovod import keras as _keras
from horovod.common._arguments import takes
from horovod.common._names import Average
from horovod.keras import *  # noqa: F403 (its __all__)

__all__ = [*_keras.__all__]

DistributedOptimizer = _shared.unconverted(
    takes(_keras._ORDER_OF_TF_KERAS, "DistributedOptimizer", op=Average)(_shared.distributed_optimizer)
)
