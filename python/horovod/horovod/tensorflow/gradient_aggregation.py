"""The gradients of an optimizer or a tape: their reduction, and their sum over several passes on this rank first.

Thread rule: as TensorFlow optimizers, one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from horovod.common import _gradients
from horovod.common._gradients import neighbours
from horovod.tensorflow.mpi_ops import grouped_allreduce, unconverted


class Reducer(_gradients.Reducer):
    """Reduces gradients of TensorFlow."""

    def dense(self, grad: Any) -> Any:
        """The gradient, or a tensor of it for ``sparse_as_dense``."""
        return tf.convert_to_tensor(grad) if self.sparse_as_dense and isinstance(grad, tf.IndexedSlices) else grad

    def reduce(self, grads: list[Any], name: str) -> list[Any]:
        """The reduced gradients, by one call."""
        devices = {"device_dense": self.device_dense, "device_sparse": self.device_sparse}
        return list(grouped_allreduce(grads, name=name, **devices, **self.options))

    def divided(self, grad: Any, number: int) -> Any:
        """A gradient divided by a number."""
        if isinstance(grad, tf.IndexedSlices):
            return tf.IndexedSlices(grad.values / number, grad.indices, grad.dense_shape)
        return grad / number

    @unconverted
    def __call__(self, grads: Sequence[Any], variables: Sequence[Any], generic_names: bool = False) -> list[Any]:
        """Returns the reduced gradients."""
        return super().__call__(grads, variables, generic_names)

    def fused(self, indices: list[int], grads: list[Any]) -> Iterable[list[int]]:
        """One call; in a graph several, the last gradients first, which are ready first."""
        if tf.executing_eagerly():
            return [indices]

        def length(i: int) -> int:
            values = grads[i].values if isinstance(grads[i], tf.IndexedSlices) else grads[i]
            return (values.shape.num_elements() or 0) * int(values.dtype.size)

        return neighbours(indices[::-1], length)


class LocalGradientAggregationHelper:
    """Adds up gradients on this rank, and reduces the sums in each ``passes``-th pass.

    Attributes:
        counter: The number of passes since then, a variable; None before the first.
    """

    def __init__(self, reduce: Reducer, passes: int, average: bool) -> None:
        """``average``: divide the sums by the number of passes."""
        self._reduce, self._passes, self._average = reduce, passes, average
        self._sums: list[Any] = []
        if passes == 1:
            return
        self.counter: Any = None if tf.compat.v1.executing_eagerly_outside_functions() is False else tf.Variable(0)

    def _make_variables(self, grads: list[Any]) -> None:
        local = {"trainable": False, "collections": [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]}
        with tf.init_scope():
            if self.counter is None:
                self.counter = tf.compat.v1.Variable(0, use_resource=True, **local)
            self._sums = [
                tf.compat.v1.Variable(tf.zeros(grad.shape, grad.dtype), use_resource=True, **local) for grad in grads
            ]

    @unconverted
    def compute_gradients(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Adds gradients; returns the reduced sums in each ``passes``-th pass, else the sums of this rank."""
        if self._passes == 1:
            return self._reduce(grads, variables)
        given = [self._reduce.dense(grad) for grad in grads]
        if any(isinstance(grad, tf.IndexedSlices) for grad in given):
            raise ValueError("backward_passes_per_step > 1 needs sparse_as_dense=True for tf.IndexedSlices")
        present = [i for i, grad in enumerate(given) if grad is not None]
        if not self._sums:
            self._make_variables([given[i] for i in present])
        added = [total.assign_add(given[i]) for total, i in zip(self._sums, present, strict=True)]
        with tf.control_dependencies(added):
            count = self.counter.assign_add(1)
        with tf.control_dependencies([count]):
            sums = [total.read_value() for total in self._sums]

        def last() -> list[Any]:
            means = self._reduce(sums, [variables[i] for i in present])
            with tf.control_dependencies(means):
                cleared = [total.assign(tf.zeros_like(total)) for total in self._sums] + [self.counter.assign(0)]
            with tf.control_dependencies(cleared):
                return [mean / self._passes if self._average else tf.identity(mean) for mean in means]

        with tf.control_dependencies(sums):
            is_last = tf.equal(self.counter.read_value(), self._passes)
        found = tf.cond(is_last, last, lambda: [tf.identity(total) for total in sums])
        for i, grad in zip(present, found if isinstance(found, (list, tuple)) else [found], strict=True):
            given[i] = grad
        return given

    @unconverted
    def apply_gradients(self, apply: Callable[[], Any], skip: Callable[[], Any], grads: Sequence[Any]) -> Any:
        """Calls ``apply`` after a pass that has reduced the sums, else ``skip``. ``grads``: those of that pass."""
        if self._passes == 1:
            return apply()
        with tf.control_dependencies([grad for grad in grads if grad is not None]):
            is_complete = tf.equal(self.counter.read_value(), 0)
        return tf.cond(is_complete, apply, skip)
