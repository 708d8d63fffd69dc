"""Horovod for ``tf.keras``, on dl_comm.

    import horovod.tensorflow.keras as hvd

    hvd.init()
    model.compile(hvd.DistributedOptimizer(optimizer), loss=...)
    model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()])

That is Keras 3, or ``tf_keras`` with ``TF_USE_LEGACY_KERAS=1``.

Raises ValueError for a wrong argument, and what the collectives of `horovod.tensorflow` or `horovod.torch` raise.
Thread rule: as Keras, one thread trains a model.
"""

from horovod import keras as _keras
from horovod.keras import *  # noqa: F403 (its __all__)
from horovod.keras import DistributedOptimizerOfTfKeras as DistributedOptimizer

__all__ = [*_keras.__all__, "DistributedOptimizer"]
