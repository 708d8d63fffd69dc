"""Learning rate schedules as TensorFlow tensors.

Thread rule: as TensorFlow's for adding operations to a graph.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from dl_comm.tensorflow import _ops
from dl_comm.training import Schedule


@_ops.no_autograph
def learning_rate(schedule: Schedule, step: Any, dtype: Any = tf.float32) -> tf.Tensor:
    """Return the rate of `schedule` in a step as a tensor, in eager mode, a `tf.function` or a TF1 graph.

    Args:
        schedule: A schedule of `dl_comm.training`.
        step: The step as a tensor, a variable or a number, for example
            `tf.compat.v1.train.get_or_create_global_step()`.
        dtype: The type of the result; the rate is computed in float64.
    """
    # The cast also converts a TF1 reference variable to a tensor.
    return tf.cast(schedule.rate(tf.cast(step, tf.float64), tf), dtype)
