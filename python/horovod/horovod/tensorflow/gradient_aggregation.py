"""The gradients of an optimizer or a tape: their reduction, and their sum over several passes on this rank first.

Thread rule: as TensorFlow optimizers, one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.util import split_list
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.mpi_ops import Adasum, Average, grouped_allreduce

_BUCKET_BYTES = 25 << 20
"""What a graph reduces at once while backward goes on; the default of torch's DistributedDataParallel."""


def check_options(op: int, predivide: float, groups: Any, average_aggregated: bool = False) -> None:
    """Raises ValueError for options of an optimizer or tape that do not fit each other."""
    if predivide != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor needs op=hvd.Average")
    if op == Adasum and average_aggregated:
        raise ValueError("Adasum and average_aggregated_gradients exclude each other")
    if groups is not None and not isinstance(groups, list) and not groups > 0:
        raise ValueError("groups is a positive number of groups, or a list of lists of variables")


class Reducer:
    """Reduces gradients over the ranks, but those of local variables.

    Args:
        name: What the ranks match; the same on all ranks.
        device_dense: Where the ops of tensors run.
        device_sparse: Where those of ``tf.IndexedSlices`` run.
        compression: How the values travel.
        sparse_as_dense: Whether ``tf.IndexedSlices`` become tensors first.
        op: The operator.
        predivide: The part of the division of an average that comes before the sum.
        groups: A number of groups, or lists of variables, of which each is one call; None: as it is fastest.
        process_set: The ranks; others keep their gradients.
        scale_local: Whether to divide the gradients of local variables by the number of ranks, so that they have the
            weight that they have in a mean over all.
    """

    def __init__(
        self,
        name: str,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Any = Compression.none,
        sparse_as_dense: bool = False,
        op: int = Average,
        predivide: float = 1.0,
        groups: Any = None,
        process_set: ProcessSet = global_process_set,
        scale_local: bool = True,
    ) -> None:
        self.name, self.sparse_as_dense, self.groups, self.scale_local = name, sparse_as_dense, groups, scale_local
        self.process_set = process_set
        self.options = {
            "device_dense": device_dense,
            "device_sparse": device_sparse,
            "compression": compression,
            "op": op,
            "process_set": process_set,
        }
        if op == Average:
            self.options.update(prescale_factor=1.0 / predivide, postscale_factor=predivide)
        self._local: dict[int, Any] = {}

    def add_local(self, variable: Any) -> None:
        """Leaves the gradients of a variable to this rank."""
        self._local[id(variable)] = variable

    def is_local(self, variable: Any) -> bool:
        """Whether a variable is local."""
        return id(variable) in self._local

    def dense(self, grad: Any) -> Any:
        """The gradient, or a tensor of it for ``sparse_as_dense``."""
        return tf.convert_to_tensor(grad) if self.sparse_as_dense and isinstance(grad, tf.IndexedSlices) else grad

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def __call__(self, grads: Sequence[Any], variables: Sequence[Any], generic_names: bool = False) -> list[Any]:
        """Returns the reduced gradients; None stays. ``generic_names``: names without that of the reducer."""
        results, size = [self.dense(grad) for grad in grads], self.process_set.size() or 1
        if size == 1 or not self.process_set.included():
            return results
        reduced = [i for i, grad in enumerate(results) if grad is not None and not self.is_local(variables[i])]
        for part in self._parts(reduced, results, variables):
            name = f"{'grad' if generic_names else self.name}.{part[0]}"
            found = grouped_allreduce([results[i] for i in part], name=name, **self.options)
            for i, grad in zip(part, found, strict=True):
                results[i] = grad
        for i, grad in enumerate(results):
            if self.scale_local and grad is not None and self.is_local(variables[i]):
                results[i] = _map(lambda values: values / size, grad)
        return results

    def _parts(self, indices: list[int], grads: list[Any], variables: Sequence[Any]) -> Iterator[list[int]]:
        """The indices of the gradients of each call."""
        if isinstance(self.groups, list):
            of_group = {id(variable): number for number, group in enumerate(self.groups) for variable in group}
            parts: dict[Any, list[int]] = {}
            for i in indices:
                parts.setdefault(of_group.get(id(variables[i]), (i,)), []).append(i)
            yield from parts.values()
        elif self.groups:
            yield from (list(part) for part in split_list(indices, self.groups) if part)
        elif tf.executing_eagerly():
            if indices:
                yield indices
        else:  # the last gradients are ready first
            part, total = [], 0
            for i in reversed(indices):
                part.append(i)
                shape = (grads[i].values if isinstance(grads[i], tf.IndexedSlices) else grads[i]).shape
                total += (shape.num_elements() or 0) * grads[i].dtype.size
                if total >= _BUCKET_BYTES:
                    yield part
                    part, total = [], 0
            if part:
                yield part


def _map(function: Callable[[Any], Any], grad: Any) -> Any:
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(function(grad.values), grad.indices, grad.dense_shape)
    return function(grad)


class LocalGradientAggregationHelper:
    """Adds up gradients on this rank, and reduces the sums in each ``passes``-th pass.

    Attributes:
        counter: The number of passes since then, a variable; None before the first.
    """

    def __init__(self, reduce: Reducer, passes: int, average: bool) -> None:
        """``average``: divide the sums by the number of passes."""
        self._reduce, self._passes, self._average = reduce, passes, average
        self._sums: list[Any] = []
        self.counter: Any = None if tf.compat.v1.executing_eagerly_outside_functions() is False else tf.Variable(0)

    def _make_variables(self, grads: list[Any]) -> None:
        local = {"trainable": False, "collections": [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]}
        with tf.init_scope():
            if self.counter is None:
                self.counter = tf.compat.v1.Variable(0, use_resource=True, **local)
            self._sums = [
                tf.compat.v1.Variable(tf.zeros(grad.shape, grad.dtype), use_resource=True, **local) for grad in grads
            ]

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def compute_gradients(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Adds gradients; returns the reduced sums in each ``passes``-th pass, else the sums of this rank."""
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

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def apply_gradients(self, apply: Callable[[], Any], skip: Callable[[], Any], grads: Sequence[Any]) -> Any:
        """Calls ``apply`` after a pass that has reduced the sums, else ``skip``. ``grads``: those of that pass."""
        with tf.control_dependencies([grad for grad in grads if grad is not None]):
            is_complete = tf.equal(self.counter.read_value(), 0)
        return tf.cond(is_complete, apply, skip)
