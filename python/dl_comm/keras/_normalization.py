"""`SyncBatchNormalization`: batch normalization over the batches of all ranks.

Thread rule: as Keras, one thread trains a model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import keras
import tensorflow as tf

from dl_comm._groups import Group
from dl_comm._private_names import check
from dl_comm._start import ensure_initialized
from dl_comm.tensorflow._collectives import allreduce
from dl_comm.tensorflow._ops import no_autograph

# That of layers that are made without one.
_group_of_new: ContextVar[Group | None] = ContextVar("group of new layers", default=None)


@contextlib.contextmanager
def layers_of(group: Group | None) -> Iterator[None]:
    """In this context, new layers of this thread have the group."""
    before = _group_of_new.set(group)
    try:
        yield
    finally:
        _group_of_new.reset(before)


@keras.saving.register_keras_serializable(package="dl_comm")
class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """`keras.layers.BatchNormalization` with the mean and variance of the joined batch of all ranks.

    Outputs, gradients and moving statistics are those of one process with that batch. The batches may have different
    lengths, also zero, and masks. In training a layer makes two allreduces forward (the sums and the number of values;
    then the squared deviations from the mean) and two backward, so all ranks train in the same steps. Inference needs
    no other rank.

    The arguments are those of `keras.layers.BatchNormalization`, where `synchronized` has no effect here. `group`: the
    ranks whose batches are joined; None: all. A saved model loads once `dl_comm.keras` is imported. In a function that
    XLA compiles the layer raises StateError.
    """

    def __init__(self, *args: Any, group: Group | None = None, **kwargs: Any) -> None:
        """Store the group, which is not saved with the layer: `load_model(group=)` gives it again."""
        super().__init__(*args, **kwargs)
        self._group = group or _group_of_new.get()
        self.supports_jit = False
        # Keras has no public name for the part that is different here.
        check("keras")

    @no_autograph
    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        """The mean and the variance of each channel, where the mask selects values."""
        ensure_initialized()
        shape = [1] * len(inputs.shape)
        shape[self.axis] = -1
        axes = [axis for axis, extent in enumerate(shape) if extent == 1]
        number, rounding = tf.reduce_prod(tf.gather(tf.shape(inputs), axes)), 0.0
        zero = tf.zeros([], inputs.dtype)
        selected = True
        if mask is not None:
            selected = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], tf.shape(inputs))
            # Keras adds this to the number of values.
            number, rounding = tf.reduce_sum(tf.cast(selected, inputs.dtype), axes), keras.backend.epsilon()

        def total(numbers: Any) -> Any:
            return tf.reduce_sum(numbers if mask is None else tf.where(selected, numbers, zero), axes)

        name = "SyncBatchNormalization"
        number, sums = allreduce(
            [tf.cast(number, inputs.dtype), total(inputs)], group=self._group, name=f"{name}: sums"
        )
        number += rounding
        mean = sums / number
        deviations = total(tf.square(inputs - tf.reshape(mean, shape)))
        squares = allreduce(deviations, group=self._group, name=f"{name}: squares")
        return mean, squares / number
