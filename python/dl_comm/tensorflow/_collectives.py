"""The collectives on tensors, on all ranks or on a group.

They are those of the table of collectives, as ops: in eager mode, in a `tf.function`, in TF1 graphs. All have
gradients (`_derivatives.py`).

Thread rule: any thread may call everything; the ranks of the group make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from dl_comm._arrays.arguments import NO_FACTORS, arrays_of, operator_code
from dl_comm._arrays.collectives import barrier as barrier_now
from dl_comm._arrays.groups import Group, given, is_routed
from dl_comm._base.checks import (
    checked_by_name,
    checked_flag,
    checked_ints,
    checked_name,
    checked_root,
    for_each,
    seconds,
)
from dl_comm._base.errors import ArgumentError, DTypeError
from dl_comm._base.made import Variant
from dl_comm._base.table import (
    AllGather,
    Allreduce,
    AllToAll,
    Barrier,
    Call,
    Gather,
    Option,
    Reduce,
    ReduceScatter,
    Scatter,
)
from dl_comm._levels.hierarchy import Levels, Step, run_steps
from dl_comm.tensorflow import _ops
from dl_comm.tensorflow._ops import op_of


class _Call:
    """The arguments that all collectives share, with the tensors."""

    def __init__(
        self,
        kind: type[Call],
        x: Any,
        group: Group | None = None,
        name: str | None = None,
        timeout: float | None = None,
        by_name: bool = False,
    ) -> None:
        checked_name(name)
        self.by_name = checked_by_name(by_name, name)
        self.code, self.name, self.timeout = kind.code, name or kind.name, seconds(timeout)
        self.group = _ops.number_of(group, self.code)
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
            *(
                self.code,
                self.tensors,
                self.name,
                self.group,
                self.timeout,
                operator,
                factors,
                root,
                counts,
                self.given,
            ),
            by_name=self.by_name,
        )
        return list(results) if self.is_list else results[0]

    def exchanged(self, kind: type[Call], extents: list[tf.Tensor]) -> list[tf.Tensor]:
        """Runs the collective on the extents of blocks, before the call itself."""
        name = f"{self.name}: extents"
        with tf.device("CPU:0"):  # where the ops read them
            return list(_ops.collective(kind.code, extents, name, self.group, self.timeout, by_name=self.by_name))

    def extents(self, counts: Any, ragged: bool = False) -> list[tf.Tensor]:
        """For each tensor the extents of the first axis on all ranks, if they differ."""
        if not checked_flag("ragged", ragged) and counts is None:
            return []
        if counts is not None:
            return [_counts(each) for each in for_each("counts", counts, len(self.tensors))]
        return self.exchanged(AllGather, [_ops.extent(tensor) for tensor in self.tensors])

    def with_counts(
        self,
        wanted: bool,
        result: Any,
        counts: list[tf.Tensor],
        even: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    ) -> Any:
        """The result; if ``wanted`` with the extents of its blocks: ``counts``, or ``even(extent, size)``."""
        if not checked_flag("return_counts", wanted):
            return result
        if not counts:
            with tf.device("CPU:0"):
                size = _ops.run("dl_comm_group", self.group).size
                counts = [even(_ops.extent(tensor)[0], size) for tensor in self.tensors]
        return result, counts if self.is_list else counts[0]


_NOT_HERE = ("out", "async_op")
_TENSOR = (
    " Also variables, what TensorFlow converts, and ``tf.IndexedSlices``, which become dense; numbers become tensors "
    "of int64, float64, complex128 or bool."
)
_GROUP = "The ranks that take part; None: all. Keep it as long as a graph uses it."
_NAME = (
    "A name that must be the same on all ranks; error messages contain it. Calls of the same name in one graph are "
    "numbered."
)


def _variant(kind: type[Call], returns: str = "", **more: Option) -> Variant:
    """The call of TensorFlow's tensors, which are immutable."""
    texts = {"group": _GROUP, "name": _NAME}
    if "x" in kind.positional:
        texts["x"] = kind.texts["x"] + _TENSOR
    returns = returns or kind.returns.replace("``out``, or new", "New").replace("``out`` or new", "New")
    returns = returns.replace("; with ``async_op`` a ``Work`` of it", "")
    note = (
        "An op: in eager mode, in a ``tf.function``, in a TF1 graph, where errors are ``tf.errors``, see "
        "``dl_comm.error_of``; not in a function that XLA compiles. It has a gradient."
    )
    return Variant(_NOT_HERE, more, texts, returns, note, "tf")


_SLICES = Option(
    "bool",
    "False",
    "Convert ``tf.IndexedSlices`` to dense tensors. Otherwise their sum or mean is a ``tf.IndexedSlices`` with the "
    "values and indices of all ranks, of which the numbers may differ.",
)


@op_of(Allreduce, _variant(Allreduce, sparse_as_dense=_SLICES))
def allreduce(
    x: Any, op: str, prescale: float, postscale: float, sparse_as_dense: bool, common: tuple[Any, ...]
) -> Any:
    group, name, timeout, by_name = common
    operator, factors = operator_code(op, prescale, postscale)
    if not (sparse_as_dense or isinstance(x, tf.Tensor)):
        is_list = isinstance(x, (list, tuple))
        values = _ops.listed(x) if is_list else [x]
        sparse = [i for i, value in enumerate(values) if isinstance(value, tf.IndexedSlices)]
        if sparse:
            dense = [value for i, value in enumerate(values) if i not in sparse]
            options: dict[str, Any] = {"group": group, "name": name, "timeout": timeout, "by_name": by_name}
            reduced = iter(allreduce(dense, op, prescale=prescale, postscale=postscale, **options) if dense else [])
            results = [
                _reduced_slices(value, op, factors, options) if i in sparse else next(reduced)
                for i, value in enumerate(values)
            ]
            return results if is_list else results[0]
    if group is None and is_routed() and not by_name:
        group = given(None, Allreduce.code)
    call = _Call(Allreduce, x, group, name, timeout, by_name)
    return _by_levels(call, group, op, operator, factors) if isinstance(group, Levels) else call.run(operator, factors)


@op_of(Reduce, _variant(Reduce, "On the root new tensors of the shapes and types of ``x``, on the other ranks zeros."))
def reduce(x: Any, root: int, op: str, common: tuple[Any, ...]) -> Any:
    operator, _ = operator_code(op, *NO_FACTORS)
    return _Call(Reduce, x, *common).run(operator, root=checked_root(root))


@op_of(AllGather, _variant(AllGather))
def all_gather(x: Any, counts: Any, ragged: bool, return_counts: bool, common: tuple[Any, ...]) -> Any:
    call = _Call(AllGather, x, *common)
    extents = call.extents(counts, ragged)
    return call.with_counts(return_counts, call.run(counts=extents), extents, lambda own, size: tf.fill([size], own))


@op_of(
    Gather,
    _variant(Gather, "On the root new tensors of the shape ``(sum of n, *rest)``, on the other ranks ``(0, *rest)``."),
)
def gather(x: Any, root: int, counts: Any, ragged: bool, common: tuple[Any, ...]) -> Any:
    call = _Call(Gather, x, *common)
    return call.run(counts=call.extents(counts, ragged), root=checked_root(root))


@op_of(Scatter, _variant(Scatter))
def scatter(x: Any, root: int, counts: Any, common: tuple[Any, ...]) -> Any:
    call = _Call(Scatter, x, *common)
    return call.run(counts=call.extents(counts), root=checked_root(root))


@op_of(ReduceScatter, _variant(ReduceScatter))
def reduce_scatter(x: Any, op: str, counts: Any, prescale: float, postscale: float, common: tuple[Any, ...]) -> Any:
    operator, factors = operator_code(op, prescale, postscale)
    call = _Call(ReduceScatter, x, *common)
    return call.run(operator, factors, counts=call.extents(counts))


@op_of(AllToAll, _variant(AllToAll))
def all_to_all(x: Any, send_counts: Any, receive_counts: Any, return_counts: bool, common: tuple[Any, ...]) -> Any:
    if send_counts is None and receive_counts is not None:
        raise ArgumentError("receive_counts without send_counts; give both")
    call = _Call(AllToAll, x, *common)
    sent = call.extents(send_counts)
    received = (
        call.extents(receive_counts) if receive_counts is not None or not sent else call.exchanged(AllToAll, sent)
    )
    even = lambda own, size: tf.fill([size], own // tf.cast(size, own.dtype))  # noqa: E731
    return call.with_counts(return_counts, call.run(counts=[*sent, *received]), received, even)


@op_of(Barrier, _variant(Barrier, "Nothing; in a graph, an operation that ends when every rank has called it."))
def barrier(common: tuple[Any, ...]) -> Any:
    group, name, timeout = common
    if tf.executing_eagerly():
        return barrier_now(timeout=timeout, group=group, name=name)
    checked_name(name)
    return _ops.collective(
        Barrier.code, [], name or "barrier", _ops.number_of(group, Barrier.code), timeout=seconds(timeout)
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
