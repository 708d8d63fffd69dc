"""dl_comm for Keras 3 on TensorFlow, torch or jax: `model.fit` on several ranks.

    model.compile(dl_comm.keras.DistributedOptimizer(keras.optimizers.Adam(1e-3 * dl_comm.size())), loss=...)
    model.fit(my_shard, callbacks=[dl_comm.keras.BroadcastCallback(), dl_comm.keras.MetricAverageCallback()])

Every rank runs the same script on its part of the data, with the same number of batches per epoch. Use callbacks that
write files on rank 0 only. Use callbacks that decide (EarlyStopping, ReduceLROnPlateau) on all ranks, after
MetricAverageCallback, so that they see the same numbers. These classes call `dl_comm.init()` if needed.

Errors are those of `dl_comm.tensorflow` or `dl_comm.torch`; on jax, `dl_comm.error_of` finds them. Thread rule: as
Keras, one thread trains a model.
"""

from __future__ import annotations

from dl_comm.keras._callbacks import (
    BroadcastCallback,
    MetricAverageCallback,
    StatsCallback,
    average_logs,
)
from dl_comm.keras._normalization import SyncBatchNormalization
from dl_comm.keras._optimizer import DistributedOptimizer, load_model
from dl_comm.keras._training import LearningRate

__all__ = [
    "BroadcastCallback",
    "DistributedOptimizer",
    "LearningRate",
    "MetricAverageCallback",
    "StatsCallback",
    "SyncBatchNormalization",
    "average_logs",
    "load_model",
]


def __dir__() -> list[str]:
    return sorted(__all__)
