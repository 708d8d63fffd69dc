"""Learning rate schedules as tensors of TensorFlow.

Thread rule: as TensorFlow's for adding operations to a graph.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from dl_comm.tensorflow import _ops
from dl_comm.training import Schedule


@_ops.no_autograph
def learning_rate(schedule: Schedule, step: Any, dtype: Any = tf.float32) -> tf.Tensor:
    """Give the rate that `schedule` has in a step, as a tensor: eagerly, in a `tf.function` and in a TF1 graph.

    Args:
        schedule: One of `dl_comm.training`.
        step: The number of the step as a tensor, a variable or a number, for instance
            `tf.compat.v1.train.get_or_create_global_step()`.
        dtype: The type of the result; the rate is computed in float64.
    """
    # A TF1 reference variable becomes a tensor here; operators see its value.
    return tf.cast(schedule.rate(tf.cast(step, tf.float64), tf), dtype)
