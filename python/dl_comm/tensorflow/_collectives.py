"""The collectives on tensors, on all ranks or on a group.

They are those of `dl_comm` for NumPy arrays, as ops: in eager mode, in a `tf.function`, in TF1 graphs. All have
gradients (`_derivatives.py`).

Thread rule: any thread may call everything; the ranks of the group make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from dl_comm._arguments import NO_FACTORS, arrays_of, one_array, operator_code
from dl_comm._checks import checked_flag, checked_ints, checked_name, checked_root, seconds
from dl_comm._errors import ArgumentError, DTypeError
from dl_comm._groups import Group, given, is_routed
from dl_comm._hierarchy import Levels, Step, run_steps
from dl_comm._ops import barrier as barrier_now
from dl_comm._selector import COLLECTIVES
from dl_comm.tensorflow import _ops
from dl_comm.tensorflow._ops import no_autograph


class _Call:
    """The arguments that all collectives share, with the tensors."""

    def __init__(self, code: int, x: Any, group: Group | None, name: str | None, timeout: float | None) -> None:
        checked_name(name)
        self.code, self.name, self.timeout = code, name or COLLECTIVES[code - 1], seconds(timeout)
        self.group = _ops.number_of(group, code)
        self.is_list = isinstance(x, (list, tuple))
        self.given = _ops.listed(x) if self.is_list else [x]
        self.tensors = [converted(value) for value in self.given]

    def run(
        self,
        operator: int = 0,
        factors: tuple[float, float] = NO_FACTORS,
        root: int = 0,
        counts: Sequence[tf.Tensor] = (),
    ) -> Any:
        """Runs the collective; returns results of the kind of the argument."""
        results = _ops.collective(
            self.code, self.tensors, self.name, self.group, self.timeout, operator, factors, root, counts, self.given
        )
        return list(results) if self.is_list else results[0]

    def exchanged(self, code: int, extents: tf.Tensor) -> tf.Tensor:
        """Runs the collective on the extents of blocks, before the call itself."""
        name = f"{self.name}: extents"
        with tf.device("CPU:0"):  # where the ops read them
            return _ops.collective(code, [extents], name, self.group, self.timeout)[0]

    def extents(self, counts: Any, ragged: bool) -> list[tf.Tensor]:
        """The extents of the first axis of all ranks' tensors, if they differ."""
        if not checked_flag("ragged", ragged) and counts is None:
            return []
        one_array(self.tensors)
        if counts is not None:
            return [_counts(counts)]
        return [self.exchanged(_ops.ALLGATHER, _ops.extent(self.tensors[0]))]


@no_autograph
def allreduce(
    x: Any,
    op: str = "sum",
    *,
    group: Group | None = None,
    name: str | None = None,
    timeout: float | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    sparse_as_dense: bool = False,
) -> Any:
    """Reduce tensors element by element over the ranks; every rank gets the result. Collective.

    Args:
        x: A tensor, a variable or what TensorFlow converts, a number, or a list of them, which is one call. Shapes and
            types are the same on all ranks. Numbers become tensors of int64, float64, complex128 or bool.
        op: `"sum"`, `"mean"`, `"min"`, `"max"`, `"product"`, `"bit_and"`, `"bit_or"`, `"bit_xor"` or `"adasum"`.
            `docs/collectives.md` lists the element types of each; means of integers round toward zero.
        group: The ranks that take part; None: all. Keep it as long as a graph uses it.
        name: A name that must be the same on all ranks; error messages contain it. Calls of the same name in one graph
            are numbered.
        timeout: The deadline in seconds (0: no limit), instead of the group's.
        prescale: A factor of every input of a sum of floating-point numbers.
        postscale: A factor of the sum.
        sparse_as_dense: Convert `tf.IndexedSlices` to dense tensors. Otherwise their sum or mean is a
            `tf.IndexedSlices` with the values and indices of all ranks, of which the numbers may differ.

    Returns:
        A new tensor, or a list of them.

    Raises:
        dl_comm.ArgumentError: An argument is invalid, or the group was freed.
        dl_comm.DTypeError: `x` is no tensor or number.
        dl_comm.StateError: The call is inside an XLA-compiled function.
        dl_comm.CommError: The call failed; a graph raises `tf.errors`, see `dl_comm.error_of`.
    """
    operator, factors = operator_code(op, prescale, postscale)
    if not (sparse_as_dense or isinstance(x, tf.Tensor)):
        is_list = isinstance(x, (list, tuple))
        values = _ops.listed(x) if is_list else [x]
        sparse = [i for i, value in enumerate(values) if isinstance(value, tf.IndexedSlices)]
        if sparse:
            dense = [value for i, value in enumerate(values) if i not in sparse]
            options: dict[str, Any] = {"group": group, "name": name, "timeout": timeout}
            reduced = iter(allreduce(dense, op, prescale=prescale, postscale=postscale, **options) if dense else [])
            results = [
                _reduced_slices(value, op, factors, options) if i in sparse else next(reduced)
                for i, value in enumerate(values)
            ]
            return results if is_list else results[0]
    if group is None and is_routed():
        group = given(None, _ops.ALLREDUCE)
    call = _Call(_ops.ALLREDUCE, x, group, name, timeout)
    return _by_levels(call, group, op, operator, factors) if isinstance(group, Levels) else call.run(operator, factors)


@no_autograph
def reduce(
    x: Any,
    root: int = 0,
    op: str = "sum",
    *,
    group: Group | None = None,
    name: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Reduce tensors over the ranks; rank `root` of the group gets the result. Collective.

    Arguments and errors are those of `allreduce`, without `"adasum"`; `tf.IndexedSlices` become dense.

    Returns:
        On the root as `allreduce`, on the other ranks zeros.
    """
    operator, _ = operator_code(op, *NO_FACTORS)
    return _Call(_ops.REDUCE, x, group, name, timeout).run(operator, root=checked_root(root))


@no_autograph
def all_gather(
    x: Any,
    *,
    group: Group | None = None,
    name: str | None = None,
    timeout: float | None = None,
    counts: Any = None,
    ragged: bool = False,
) -> Any:
    """Join the tensors of all ranks along the first axis, in the order of the ranks; every rank gets the result.

    Collective.

    Args:
        x: As for `allreduce`. A number or a tensor without axes counts as a tensor of one element.
        group: As for `allreduce`.
        name: As for `allreduce`.
        timeout: As for `allreduce`.
        counts: The extents of the first axis of every rank's tensor, if they differ; the same on all ranks. A list or
            a tensor. One tensor.
        ragged: The extents differ, and the ranks exchange them first.

    Returns:
        New tensors, of which the first axis has the sum of the extents.
    """
    call = _Call(_ops.ALLGATHER, x, group, name, timeout)
    return call.run(counts=call.extents(counts, ragged))


@no_autograph
def gather(
    x: Any,
    root: int = 0,
    *,
    group: Group | None = None,
    name: str | None = None,
    timeout: float | None = None,
    counts: Any = None,
    ragged: bool = False,
) -> Any:
    """As `all_gather`, but only rank `root` of the group gets the result; the others get no rows. Collective."""
    call = _Call(_ops.GATHER, x, group, name, timeout)
    return call.run(counts=call.extents(counts, ragged), root=checked_root(root))


@no_autograph
def scatter(
    x: Any,
    root: int = 0,
    *,
    group: Group | None = None,
    name: str | None = None,
    timeout: float | None = None,
    counts: Any = None,
) -> Any:
    """Cut the tensors of rank `root` along the first axis into a block for each rank. Collective.

    Args:
        x: As for `allreduce`, without numbers. The other ranks than the root pass tensors of the same types and shapes,
            whose values are not used; with `counts` their first axis may differ.
        root: The rank of the group that has the values.
        group: As for `allreduce`.
        name: As for `allreduce`.
        timeout: As for `allreduce`.
        counts: The extents of the blocks' first axes, if they differ; the same on all ranks. One tensor.

    Returns:
        New tensors with this rank's blocks.
    """
    call = _Call(_ops.SCATTER, x, group, name, timeout)
    return call.run(counts=call.extents(counts, False), root=checked_root(root))


@no_autograph
def reduce_scatter(
    x: Any,
    op: str = "sum",
    *,
    group: Group | None = None,
    name: str | None = None,
    timeout: float | None = None,
    counts: Any = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> Any:
    """Reduce tensors over the ranks and cut the result along the first axis into a block for each rank. Collective.

    Args:
        x: As for `allreduce`, without numbers; `tf.IndexedSlices` become dense. The first axis is a multiple of the
            number of ranks, unless `counts` is given.
        op: As for `allreduce`, without `"adasum"`.
        group: As for `allreduce`.
        name: As for `allreduce`.
        timeout: As for `allreduce`.
        counts: The extents of the blocks' first axes, if they differ; the same on all ranks. One tensor.
        prescale: As for `allreduce`.
        postscale: As for `allreduce`.

    Returns:
        New tensors with this rank's blocks.
    """
    operator, factors = operator_code(op, prescale, postscale)
    call = _Call(_ops.REDUCE_SCATTER, x, group, name, timeout)
    return call.run(operator, factors, counts=call.extents(counts, False))


@no_autograph
def all_to_all(
    x: Any,
    *,
    group: Group | None = None,
    name: str | None = None,
    timeout: float | None = None,
    send_counts: Any = None,
    receive_counts: Any = None,
) -> Any:
    """Send block r of every tensor, along the first axis, to rank r; the result has a block from each rank. Collective.

    Args:
        x: As for `allreduce`, without numbers. The first axis is a multiple of the number of ranks, unless
            `send_counts` is given.
        group: As for `allreduce`.
        name: As for `allreduce`.
        timeout: As for `allreduce`.
        send_counts: The extents of the first axes of the blocks that this rank sends, if they differ. One tensor.
        receive_counts: The same of those that it receives; None with `send_counts`: the ranks exchange them first. All
            ranks give it, or none does.

    Returns:
        New tensors.
    """
    if send_counts is None and receive_counts is not None:
        raise ArgumentError("receive_counts without send_counts; give both")
    call = _Call(_ops.ALLTOALL, x, group, name, timeout)
    counts = call.extents(send_counts, False)
    if counts:
        received = None if receive_counts is None else _counts(receive_counts)
        counts.append(call.exchanged(_ops.ALLTOALL, counts[0]) if received is None else received)
    return call.run(counts=counts)


@no_autograph
def barrier(*, timeout: float | None = None, group: Group | None = None, name: str | None = None) -> Any:
    """Return when every rank has called it; in a graph, an operation that ends then. Collective.

    Args:
        timeout: As for `allreduce`.
        group: As for `allreduce`.
        name: As for `allreduce`; used in graphs.

    Raises:
        dl_comm.CommError: As `dl_comm.barrier`; in a graph, the operation raises `tf.errors`, see `dl_comm.error_of`.
    """
    if tf.executing_eagerly():
        return barrier_now(timeout=timeout, group=group)
    checked_name(name)
    return _ops.collective(
        _ops.BARRIER, [], name or "barrier", _ops.number_of(group, _ops.BARRIER), timeout=seconds(timeout)
    )


def converted(value: Any) -> tf.Tensor:
    """Convert a tensor, what TensorFlow converts, or a number. Raises DTypeError for other values.

    Tensors stay as they are: the ops refuse other types.
    """
    if isinstance(value, tf.Tensor):
        return value
    if isinstance(value, (bool, int, float, complex, np.generic, np.ndarray)):
        (value,), _ = arrays_of(value)  # refuses masked arrays
    return _ops.as_tensor(value, _ops.ALL_TYPES, "sent to other ranks")


def _by_levels(call: _Call, levels: Levels, op: str, operator: int, factors: tuple[float, float]) -> Any:
    """The allreduce of a call through the levels of the communicator stack. Sums and means are differentiable."""
    steps = levels.steps(operator, factors, any(x.dtype.is_integer or x.dtype.is_bool for x in call.tensors))

    def run(step: Step, values: list[tf.Tensor]) -> list[tf.Tensor]:
        where = (call.name, step.group.number, call.timeout)
        return list(_ops.collective(step.collective, values, *where, step.operator, step.factors, named=call.given))

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def allreduce(*tensors: tf.Tensor) -> Any:
        # The sums of the steps need the range of the sums within a call.
        wide = [tf.cast(x, tf.float32) if x.dtype in (tf.float16, tf.bfloat16) else x for x in tensors]
        results = run_steps(steps, wide, run)

        def gradient(*upstream: tf.Tensor) -> Any:
            if op not in ("sum", "mean"):
                raise LookupError(f"dl_comm: allreduce with op={op!r} through several levels has no gradient")
            indices = [i for i, x in enumerate(tensors) if x.dtype.is_floating or x.dtype.is_complex]
            found: list[Any] = [None] * len(tensors)
            for i, dx in zip(indices, allreduce(*(upstream[i] for i in indices)), strict=True):
                found[i] = dx
            return found

        return [tf.cast(y, x.dtype) for y, x in zip(results, tensors, strict=True)], gradient

    results = allreduce(*call.tensors)
    return results if call.is_list else results[0]


def _counts(counts: Any) -> tf.Tensor:
    if not tf.is_tensor(counts):
        return tf.constant(checked_ints("counts", counts, 0, 2**62), tf.int64)
    if not counts.dtype.is_integer:
        raise ArgumentError(f"invalid counts: a tensor of {counts.dtype.name} (expected integers)")
    return tf.cast(counts, tf.int64)


def _reduced_slices(
    slices: tf.IndexedSlices, op: str, factors: tuple[float, float], options: dict[str, Any]
) -> tf.IndexedSlices:
    """The sum or mean of slices: those of all ranks, since slices with equal indices are added."""
    if op not in ("sum", "mean"):
        raise ArgumentError(f"tf.IndexedSlices have a sum and a mean; for op={op!r} give sparse_as_dense=True")
    base = options["name"] or "allreduce"

    def joined(part: Any, what: str, counts: Any) -> Any:
        return all_gather(part, counts=counts, **{**options, "name": f"{base}: {what}"})

    counts = joined(tf.shape(slices.indices, tf.int64), "rows", None)
    values = joined(slices.values, "values", counts)
    indices = joined(slices.indices, "indices", counts)
    factor = tf.constant(factors[0] * factors[1], tf.float64)
    if op == "mean":
        factor /= tf.cast(_ops.run("dl_comm_group", _ops.number_of(options["group"])).size, tf.float64)
    if op == "mean" or factors != NO_FACTORS:
        if not (values.dtype.is_floating or values.dtype.is_complex):
            raise DTypeError(f"tf.IndexedSlices of {values.dtype.name} have no mean; give sparse_as_dense=True")
        values *= tf.cast(factor, values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)
