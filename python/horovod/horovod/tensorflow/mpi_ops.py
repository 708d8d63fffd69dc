"""Horovod's collectives on TensorFlow tensors: eager, in a ``tf.function``, in TF1 graphs.

    total = hvd.allreduce(gradient, op=hvd.Sum, name="layer1")
    rows = hvd.allgather(tf.ones([hvd.rank() + 1, 3]))  # (sum of all ranks' rows, 3), on every rank
    mine = hvd.alltoall(rows)

Of all: tensors have any shape. The ranks of ``process_set`` must all make the call. They match it by ``name``, whatever
else they run; without a name, in a graph by the name of the tensor, and else by the order of such calls.
``grouped_*`` take a list of tensors and return a list. All have gradients, which are Horovod's: see each. Ops in a
``tf.function`` start when their inputs are there.

Reductions take integers of 8, 32 and 64 bits and floating-point numbers, also bfloat16; the others every type.
``prescale_factor`` multiplies the input and ``postscale_factor`` the result: integers in float64, then truncated, and
types of 16 bits in float32. ``ignore_name_scope`` has no effect: names are without scopes.

Raises, of all, when the op runs (eager: at the call):
    tf.errors.InvalidArgumentError: A wrong type, a name that is in use, bad splits, or this rank is not in the set.
    tf.errors.FailedPreconditionError: The ranks differ; on every rank, and the next call works. Or ``shutdown`` was
        called.
    tf.errors.InternalError, tf.errors.DeadlineExceededError: A rank was lost, or missed the deadline.
And when it is made, ValueError: the process set does not exist, or before ``init``.

Thread rule: any thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

import dl_comm
import dl_comm.tensorflow
from horovod.common import _job, _names
from horovod.common import basics as _shared
from horovod.common._calls import MATCHING, Call
from horovod.common._names import *  # noqa: F403 (its __all__)
from horovod.common._names import ProcessSet, global_process_set, is_initialized, local_rank, local_size, rank
from horovod.common.basics import HorovodBasics
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import size_of
from horovod.common.util import get_average_backwards_compatibility_fun, num_rank_is_power_2
from horovod.tensorflow.compression import Compression

core: Any = dl_comm.tensorflow
"""Whose overloads do not know lists of options."""
_basics = HorovodBasics(__file__, "tensorflow")
is_homogeneous = _basics.is_homogeneous
Average, Sum, Adasum, Min, Max, Product = range(6)
handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(_basics)
check_num_rank_power_of_2 = num_rank_is_power_2

__all__ = [
    *_names.__all__,
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "check_num_rank_power_of_2",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "handle_average_backwards_compatibility",
    "is_homogeneous",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "size_op",
]

_OPERATORS = {Average: "mean", Sum: "sum", Adasum: "adasum", Min: "min", Max: "max", Product: "product"}
_ERRORS = (
    ((dl_comm.ArgumentError, dl_comm.DTypeError), tf.errors.InvalidArgumentError),
    ((dl_comm.MismatchError, dl_comm.StateError), tf.errors.FailedPreconditionError),
    (dl_comm.TimeoutError, tf.errors.DeadlineExceededError),
    (dl_comm.CommError, tf.errors.InternalError),
)
Tensors = Sequence[Any]
Options = dict[str, Any]
"""The core's options of a call."""
_Function = TypeVar("_Function", bound=Callable[..., Any])


def unconverted(function: _Function) -> _Function:
    """Leaves a function as it is in a ``tf.function``, which else rewrites it."""
    marked: _Function = tf.autograph.experimental.do_not_convert(function)
    return marked


# What all collectives share.


def _run(
    kind: str,
    given: Tensors,
    name: str | None,
    process_set: ProcessSet,
    forward: Callable[..., Any],
    gradient: Callable[..., Any],
) -> list[Any]:
    """Makes a collective.

    Args:
        kind: What begins its name.
        given: What becomes the tensors.
        name: The script's name, or None.
        process_set: The ranks.
        forward: Makes it: a function of the tensors and the core's options that returns a list.
        gradient: A function of the gradients of the results and of a name: the gradients of the tensors.
    """
    number, job = process_set.process_set_id, _job.current()
    tensors = [x if isinstance(x, tf.Tensor) else tf.convert_to_tensor(x) for x in given]
    eager = tf.executing_eagerly()
    size_of(number if number is not None else -1)  # raises if there is no such set
    if number not in job.groups:
        text = f"rank {job.rank} is not in process set {number}, which has the ranks {job.sets[number or 0]}"
        if eager:
            raise tf.errors.InvalidArgumentError(None, None, text)
        with tf.control_dependencies([tf.debugging.Assert(False, [text])]):
            return [tf.identity(x) for x in tensors]
    inner = f"{name}.gradient" if name else None
    if eager:
        try:
            call = Call(kind, name, process_set)
        except ValueError as error:  # the name is in use
            raise tf.errors.InvalidArgumentError(None, None, str(error)) from error
        options = call.options()
    else:
        options = {"group": job.groups[number], "name": f"{kind}.{name or tensors[0].name}", **MATCHING}

    def differentiable(*inputs: tf.Tensor) -> Any:
        return forward(list(inputs), options), lambda *grads: gradient(list(grads), inner)

    try:
        return list(tf.custom_gradient(differentiable)(*tensors))
    except dl_comm.CommError as error:
        raised = next(raised for known, raised in _ERRORS if isinstance(error, known))
        raise raised(None, None, str(error)) from error
    finally:
        if eager:
            call.end()


def _root(root_rank: int, process_set: ProcessSet) -> int:
    """The place of a rank of the job in a set; one that the core refuses if it is not in there."""
    ranks = _job.current().sets.get(process_set.process_set_id or 0, [])
    return ranks.index(root_rank) if root_rank in ranks else len(ranks)


def _reduction(op: int, factors: tuple[float, float]) -> dict[str, Any]:
    """The core's operator and factors, as options of a call."""
    if op not in _OPERATORS:
        raise ValueError(f"invalid op: {op!r} (expected hvd.Average, Sum, Adasum, Min, Max or Product)")
    return {"op": _OPERATORS[op], "prescale": float(factors[0]), "postscale": float(factors[1])}


# Allreduce.


def _reduced(
    kind: str, tensors: Tensors, name: str | None, op: int, factors: tuple[float, float], process_set: ProcessSet
) -> list[Any]:
    def gradient(grads: list[Any], inner: str | None) -> list[Any]:
        return _reduced(kind, grads, inner, op, factors, process_set)

    reduction = _reduction(op, factors)
    return _run(
        kind, tensors, name, process_set, lambda x, options: core.allreduce(x, **reduction, **options), gradient
    )


def _refuse_sparse(op: int, factors: tuple[float, float]) -> None:
    if op not in (Sum, Average):
        raise NotImplementedError(
            "tf.IndexedSlices have the operators hvd.Average and hvd.Sum only; sparse_as_dense=True has all"
        )
    if factors != (1.0, 1.0):
        raise NotImplementedError("tf.IndexedSlices have no factors; sparse_as_dense=True has them")


def _reduced_slices(
    slices: list[tf.IndexedSlices], name: str | None, op: int, process_set: ProcessSet
) -> list[tf.IndexedSlices]:
    values = grouped_allgather([each.values for each in slices], name and f"{name}.values", False, process_set)
    indices = grouped_allgather([each.indices for each in slices], name and f"{name}.indices", False, process_set)
    if op == Average:
        values = [each / tf.cast(process_set.size(), each.dtype) for each in values]
    shapes = [each.dense_shape for each in slices]
    return [tf.IndexedSlices(*each) for each in zip(values, indices, shapes, strict=True)]


@unconverted
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Returns the reduction of a tensor over the ranks.

    The gradient is reduced by the same operator and factors.

    Args:
        tensor: Of the same shape and type on all ranks. Sums and averages of ``tf.IndexedSlices`` are those of all
            ranks, joined.
        average: Deprecated: True for Average, False for Sum.
        device_dense: Where the op of a tensor runs.
        device_sparse: Where those of ``tf.IndexedSlices`` run.
        compression: How the values travel.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``.
        prescale_factor: A factor of the input.
        postscale_factor: A factor of the result.
        name: What the ranks match.
        process_set: The ranks.
        ignore_name_scope: Not used.

    Raises:
        NotImplementedError: Factors or another operator for ``tf.IndexedSlices``.
    """
    op, factors = handle_average_backwards_compatibility(op, average), (prescale_factor, postscale_factor)
    devices = device_dense, device_sparse
    return _allreduced("allreduce", [tensor], name, op, factors, process_set, devices, compression)[0]


@unconverted
def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Returns the reductions of a list of tensors, as one call; as ``allreduce``."""
    op, factors = handle_average_backwards_compatibility(op, average), (prescale_factor, postscale_factor)
    devices = device_dense, device_sparse
    return _allreduced("grouped_allreduce", tensors, name, op, factors, process_set, devices, compression)


def _allreduced(
    kind: str,
    tensors: Tensors,
    name: str | None,
    op: int,
    factors: tuple[float, float],
    process_set: ProcessSet,
    devices: tuple[str, str],
    compression: Any,
) -> list[Any]:
    results = list(tensors)
    sparse = [i for i, x in enumerate(results) if isinstance(x, tf.IndexedSlices)]
    dense = [i for i, x in enumerate(results) if i not in sparse]
    if sparse:
        _refuse_sparse(op, factors)
        with tf.device(devices[1]):
            for i, y in zip(sparse, _reduced_slices([results[i] for i in sparse], name, op, process_set), strict=True):
                results[i] = y
    if dense:
        with tf.device(devices[0]):
            small = [compression.compress(tf.convert_to_tensor(results[i])) for i in dense]
            reduced = _reduced(kind, [x for x, _ in small], name, op, factors, process_set)
            for i, y, (_, context) in zip(dense, reduced, small, strict=True):
                results[i] = compression.decompress(y, context)
    return results


# All-gather.


def _gathered(kind: str, tensors: Tensors, name: str | None, process_set: ProcessSet) -> list[Any]:
    rows: list[tf.Tensor] = []
    shapes: list[tf.Tensor] = []

    def forward(x: list[tf.Tensor], options: Options) -> list[Any]:
        shapes.extend(map(tf.shape, x))
        results, counts = core.all_gather(x, ragged=True, return_counts=True, **options)
        rows.extend(counts)
        return list(results)

    def gradient(grads: list[Any], inner: str | None) -> list[Any]:
        means = _reduced(f"{kind}.gradient", grads, inner, Average, (1.0, 1.0), process_set)
        place = int(_job.group_of(process_set.process_set_id).rank)
        return [
            tf.reshape(tf.split(mean, count, num=size_of(process_set.process_set_id or 0))[place], shape)
            for mean, count, shape in zip(means, rows, shapes, strict=True)
        ]

    return _run(kind, tensors, name, process_set, forward, gradient)


@unconverted
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Returns the tensors of all ranks, joined along the first axis in the order of the ranks.

    The gradient is this rank's rows of the *average* of the ranks' gradients.

    Args:
        tensor: Of the shape ``(n, *rest)``; ``n`` may differ between ranks.
        name: What the ranks match.
        ignore_name_scope: Not used.
        process_set: The ranks.

    Returns:
        A new tensor of the shape ``(sum of n, *rest)``.
    """
    return _gathered("allgather", [tensor], name, process_set)[0]


@unconverted
def grouped_allgather(
    tensors: Tensors,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Gathers a list of tensors, as ``allgather``."""
    return _gathered("grouped_allgather", tensors, name, process_set)


# Broadcast.


@unconverted
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Returns the tensor of one rank.

    The gradient on the root is the *average* of the ranks' gradients, and zero on the others.

    Args:
        tensor: Of the same shape and type on all ranks.
        root_rank: The rank that has the values: of the job, also in a process set.
        name: What the ranks match.
        ignore_name_scope: Not used.
        process_set: The ranks.
    """
    return _broadcast("broadcast", [tensor], root_rank, name, process_set)[0]


def _broadcast(
    kind: str, tensors: Tensors, root_rank: int, name: str | None, process_set: ProcessSet
) -> list[tf.Tensor]:
    root = _root(root_rank, process_set)

    def gradient(grads: list[Any], inner: str | None) -> list[Any]:
        means = _reduced(f"{kind}.gradient", grads, inner, Average, (1.0, 1.0), process_set)
        if rank() == root_rank:
            return means
        with tf.control_dependencies(means):  # a graph would drop the call, whose values nobody reads here
            return [tf.zeros_like(mean) for mean in means]

    def forward(x: list[tf.Tensor], options: Options) -> Any:
        return core.broadcast(x, root, in_place=False, **options)

    return _run(kind, tensors, name, process_set, forward, gradient)


@unconverted
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Replaces the values of variables by those of one rank, as one call. Not differentiable.

    Args:
        variables: Those of TensorFlow or Keras, of the same shapes and types on all ranks, in the same order.
        root_rank: The rank that has the values: of the job, also in a process set.
        name: What the ranks match.
        process_set: The ranks.

    Returns:
        The new values; in a graph, tensors that depend on the assignment.
    """
    listed = list(variables)
    if not listed:
        return []
    values = _broadcast("broadcast_", listed, root_rank, name or "variables", process_set)
    done = [variable.assign(value) for variable, value in zip(listed, values, strict=True)]
    if tf.executing_eagerly():
        return [tf.convert_to_tensor(variable) for variable in listed]
    with tf.control_dependencies([each for each in done if each is not None]):
        return [tf.identity(value) for value in values]


# All-to-all.


@unconverted
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends rows of a tensor to every rank, and returns those from every rank.

    The gradient goes back to where its rows came from.

    Args:
        tensor: Of the shape ``(n, *rest)``; ``n`` may differ between ranks.
        splits: How many rows each rank gets, in the order of the ranks: integers; their sum is at most ``n``. None: as
            many each.
        name: What the ranks match.
        ignore_name_scope: Not used.
        process_set: The ranks.

    Returns:
        The rows, in the order of the ranks that sent them. With ``splits`` also how many came from each: int32.
    """
    counts: list[tf.Tensor] = []
    count = size_of(process_set.process_set_id if process_set.process_set_id is not None else -1)
    wanted = None if splits is None else tf.convert_to_tensor(splits)

    def forward(x: list[tf.Tensor], options: Options) -> list[Any]:
        (rows,) = x
        with tf.device("CPU:0"):
            extent = tf.shape(rows, tf.int64)[0] if rows.shape.rank != 0 else tf.constant(-1, tf.int64)
            sent = tf.fill([count], extent // count) if wanted is None else tf.cast(wanted, tf.int64)
            if wanted is not None:
                total = tf.reduce_sum(sent)
                rows = rows[: tf.minimum(total, extent)]
        result, received = core.all_to_all(rows, send_counts=sent, return_counts=True, **options)
        counts.extend((sent, received))
        return [result]

    given = tf.convert_to_tensor(tensor)

    def gradient(grads: list[Any], inner: str | None) -> list[Any]:
        back, _ = alltoall(grads[0], counts[1], inner, process_set=process_set)
        missing = tf.concat([tf.shape(given)[:1] - tf.shape(back)[:1], tf.shape(given)[1:]], 0)
        return [tf.concat([back, tf.zeros(missing, back.dtype)], 0)]  # zeros for rows that were not sent

    result = _run("alltoall", [given], name, process_set, forward, gradient)[0]
    if splits is None:
        return result
    return result, tf.cast(counts[1], tf.int32) if counts else tf.identity(wanted)


# Reduce-scatter: the first ranks get one row more.


def _scattered(
    kind: str, tensors: Tensors, name: str | None, op: int, process_set: ProcessSet, factors: tuple[float, float]
) -> list[Any]:
    count = size_of(process_set.process_set_id if process_set.process_set_id is not None else -1)
    if op not in (Average, Sum):
        raise NotImplementedError("reducescatter has the operators hvd.Average and hvd.Sum only")
    reduction = _reduction(op, factors)

    def forward(x: list[tf.Tensor], options: Options) -> Any:
        if any(each.shape.rank == 0 for each in x):
            raise dl_comm.ArgumentError("reducescatter takes tensors with at least one axis")
        with tf.device("CPU:0"):
            longer = count - 1 - tf.range(count, dtype=tf.int64)
            counts = [(tf.shape(each, tf.int64)[0] + longer) // count for each in x]
        return core.reduce_scatter(x, counts=counts, **reduction, **options)

    def gradient(grads: list[Any], inner: str | None) -> list[Any]:
        factor = (count if op == Sum else 1) * factors[0] * factors[1]
        scaled = [each * tf.cast(factor, each.dtype) for each in grads]
        return _gathered(f"{kind}.gradient", scaled, inner, process_set)

    return _run(kind, tensors, name, process_set, forward, gradient)


@unconverted
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Returns this rank's rows of the reduction of a tensor over the ranks.

    The gradients are gathered, multiplied by the number of ranks for Sum, and by the factors; for Average they are not
    divided.

    Args:
        tensor: Of the shape ``(n, *rest)``, the same on all ranks. If ``n`` is no multiple of the number of ranks, the
            first ranks get one row more.
        device_dense: Where the op runs.
        compression: How the values travel.
        op: ``Average`` or ``Sum``.
        name: What the ranks match.
        process_set: The ranks.
        ignore_name_scope: Not used.
        prescale_factor: A factor of the input.
        postscale_factor: A factor of the result.

    Raises:
        NotImplementedError: Another operator.
    """
    with tf.device(device_dense):
        small, context = compression.compress(tf.convert_to_tensor(tensor))
        factors = prescale_factor, postscale_factor
        found = _scattered("reducescatter", [small], name, op, process_set, factors)
        return compression.decompress(found[0], context)


@unconverted
def grouped_reducescatter(
    tensors: Tensors,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[tf.Tensor]:
    """Reduces and scatters a list of tensors, as ``reducescatter``."""
    if not tensors:
        return []
    with tf.device(device_dense):
        small = [compression.compress(tf.convert_to_tensor(tensor)) for tensor in tensors]
        factors = prescale_factor, postscale_factor
        found = _scattered("grouped_reducescatter", [x for x, _ in small], None, op, process_set, factors)
        return [compression.decompress(y, context) for y, (_, context) in zip(found, small, strict=True)]


# Numbers that a graph reads when it runs.


@unconverted
def _number(value: Callable[[], int], name: str | None = None) -> tf.Tensor:
    if tf.executing_eagerly():
        return tf.constant(value(), tf.int32)
    found = tf.numpy_function(lambda: np.int32(value()), [], tf.int32, name=name)
    found.set_shape(())
    return found


def join() -> tf.Tensor:
    """Contributes zeros to the other ranks' sums and averages until all ranks have joined. Collective.

    For ranks with less data than others. Until then the other ranks' minima, maxima, products, Adasum, and other
    collectives raise FailedPreconditionError.

    Returns:
        The rank that joined last, in a graph when it runs: int32.
    """
    return _number(_shared.join)


def rank_op(name: str | None = None) -> tf.Tensor:
    """The rank of this process when the op runs: int32. ``name``: that of the op."""
    return _number(rank, name)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """The number of this rank among those of its host when the op runs: int32. ``name``: that of the op."""
    return _number(local_rank, name)


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """The number of ranks of a process set when the op runs: int32. ``name``: that of the op."""
    return _number(functools.partial(size_of, process_set_id), name)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """The number of ranks on this host when the op runs: int32. ``name``: that of the op."""
    return _number(local_size, name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Whether this rank is in a process set when the op runs, as int32. ``name``: that of the op.

    Returns:
        1 or 0; -1 before ``init``; -3 if there is no such set.
    """

    def value() -> int:
        if not is_initialized():
            return -1
        ranks = _job.current().sets.get(process_set_id)
        return -3 if ranks is None else int(rank() in ranks)

    return _number(value, name)
