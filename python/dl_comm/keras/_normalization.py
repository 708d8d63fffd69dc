"""`SyncBatchNormalization`: batch normalization over the batches of all ranks.

Thread rule: as Keras, one thread trains a model.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import keras
from keras import ops

from dl_comm._arrays.groups import Group
from dl_comm._job.start import ensure_initialized
from dl_comm.keras._backend import check, on, untraced

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
        check()

    @untraced
    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        """The mean and the variance of each channel, where the mask selects values."""
        ensure_initialized()
        shape = [1] * len(inputs.shape)
        shape[self.axis] = -1
        axes = [axis for axis, extent in enumerate(shape) if extent == 1]
        number, rounding = math.prod(ops.shape(inputs)[axis] for axis in axes), 0.0
        zero = ops.zeros([], inputs.dtype)
        selected = True
        if mask is not None:
            selected = ops.broadcast_to(ops.expand_dims(ops.cast(mask, "bool"), -1), ops.shape(inputs))
            # Keras adds this to the number of values.
            number, rounding = ops.sum(ops.cast(selected, inputs.dtype), axes), keras.backend.epsilon()

        def total(numbers: Any) -> Any:
            return ops.sum(numbers if mask is None else ops.where(selected, numbers, zero), axes)

        name = "SyncBatchNormalization"
        number, sums = on.sums([ops.cast(number, inputs.dtype), total(inputs)], self._group, f"{name}: sums")
        number += rounding
        mean = sums / number
        deviations = total(ops.square(inputs - ops.reshape(mean, shape)))
        (squares,) = on.sums([deviations], self._group, f"{name}: squares")
        return mean, squares / number
