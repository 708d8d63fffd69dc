"""Batch normalization over the joined batch of all ranks: for Keras 3 that of dl_comm, and one for ``tf_keras``."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod.common._names import Average, global_process_set
from horovod.tensorflow.mpi_ops import allreduce

if tf.keras.layers.Layer.__module__.partition(".")[0] == "keras":
    from dl_comm.keras import SyncBatchNormalization as _Keras3

    class SyncBatchNormalization(_Keras3):
        """``keras.layers.BatchNormalization`` over the joined batch of all ranks, which may have different lengths.

        The arguments are those of ``keras.layers.BatchNormalization``; ``fused`` must be False.
        """

        def __init__(self, fused: bool = False, **kwargs: Any) -> None:
            _refuse_fused(fused)
            super().__init__(**kwargs)

else:

    class SyncBatchNormalization(tf.keras.layers.BatchNormalization):  # type: ignore[misc,no-redef]
        """``tf.keras.layers.BatchNormalization`` over the joined batch of all ranks, of equal lengths.

        The arguments are those of ``tf.keras.layers.BatchNormalization``; ``fused`` must be False.
        """

        def __init__(self, fused: bool = False, **kwargs: Any) -> None:
            _refuse_fused(fused)
            super().__init__(fused=False, **{**kwargs, "name": kwargs.get("name") or "sync_batch_normalization"})

        def _moments(self, inputs: Any, reduction_axes: Any, keep_dims: bool, **kwargs: Any) -> Any:
            mean, variance = super()._moments(inputs, reduction_axes, keep_dims=keep_dims, **kwargs)
            if (global_process_set.size() or 1) == 1:
                return mean, variance
            # The mean of the squares of all ranks, less the square of their mean.
            both = tf.stack([mean, variance + tf.square(mean)])
            mean, squares = tf.unstack(allreduce(both, op=Average, name="sync_batch_normalization"))
            return mean, squares - tf.square(mean)


def _refuse_fused(fused: Any) -> None:
    if fused in (True, None):
        raise ValueError("SyncBatchNormalization does not support fused=True")
