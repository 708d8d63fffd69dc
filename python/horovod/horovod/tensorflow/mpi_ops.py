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
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

import dl_comm
import dl_comm.tensorflow
from horovod.common import _job, _names
from horovod.common import basics as _shared
from horovod.common._arguments import takes
from horovod.common._calls import MATCHING, Call, reduction, reduction_of_rows
from horovod.common._names import *  # noqa: F403 (its __all__)
from horovod.common._names import Average, ProcessSet, Sum, global_process_set, is_initialized, rank
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import size_of
from horovod.common.util import get_average_backwards_compatibility_fun, num_rank_is_power_2

core: Any = dl_comm.tensorflow
"""Whose overloads do not know lists of options."""
_basics = _shared.HorovodBasics(__file__, "tensorflow")
handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(_basics)
check_num_rank_power_of_2 = num_rank_is_power_2

__all__ = [*_names.__all__, "HorovodInternalError", "alltoall", "broadcast", "broadcast_", "join"]
__all__ += ["allgather", "allreduce", "grouped_allgather", "grouped_allreduce", "grouped_reducescatter"]
__all__ += ["check_num_rank_power_of_2", "handle_average_backwards_compatibility", "reducescatter"]
__all__ += ["local_rank_op", "local_size_op", "process_set_included_op", "rank_op", "size_op"]

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


class Form(NamedTuple):
    """A call of a collective, which takes a list of tensors: what begins its name, the script's name, the ranks."""

    kind: str
    name: str | None
    process_set: ProcessSet

    def of_gradient(self) -> Form:
        """The call of the gradient, under a name of its own."""
        return self._replace(kind=f"{self.kind}.gradient")

    def run(self, forward: Callable[..., Any], given: Tensors, gradient: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """Makes the call.

        Args:
            forward: Makes it: a function of the tensors and the core's options that returns a list.
            given: What becomes the tensors.
            gradient: The gradients of the tensors from those of the results.
        """
        number, job = self.process_set.process_set_id, _job.current()
        tensors = [x if isinstance(x, tf.Tensor) else tf.convert_to_tensor(x) for x in given]
        eager = tf.executing_eagerly()
        size_of(number)  # raises if there is no such set
        if number not in job.groups:
            text = f"rank {job.rank} is not in process set {number}, which has the ranks {job.sets[number or 0]}"
            if eager:
                raise tf.errors.InvalidArgumentError(None, None, text)
            with tf.control_dependencies([tf.debugging.Assert(False, [text])]):
                return [tf.identity(x) for x in tensors]
        if eager:
            try:
                call = Call(*self)
            except ValueError as error:  # the name is in use
                raise tf.errors.InvalidArgumentError(None, None, str(error)) from error
            options = call.options()
        else:
            name = f"{self.kind}.{self.name or tensors[0].name}"
            options = {"group": job.groups[number], "name": name, **MATCHING}

        def differentiable(*inputs: tf.Tensor) -> Any:
            return forward(list(inputs), options), lambda *grads: gradient(list(grads))

        try:
            return list(tf.custom_gradient(differentiable)(*tensors))
        except dl_comm.CommError as error:
            raised = next(raised for known, raised in _ERRORS if isinstance(error, known))
            raise raised(None, None, str(error)) from error
        finally:
            if eager:
                call.end()


def _function(run: Callable[..., list[Any]], called: str, arguments: str, **defaults: Any) -> Callable[..., Any]:
    """A public function of a collective: of a list of tensors if its first argument is ``tensors``.

    ``run`` takes a `Form`, the list, and the arguments that follow, but without ``ignore_name_scope``.
    """
    first = arguments.split()[0]

    def function(process_set: ProcessSet, name: str | None = None, ignore_name_scope: Any = None, **more: Any) -> Any:
        given, form = more.pop(first), Form(called, name, process_set)
        if first == "tensors":
            return run(form, list(given), **more) if len(given) else []
        return run(form, [given], **more)[0]

    found = takes(arguments, called, **defaults)(function)
    found.__doc__ = run.__doc__ if first == "tensor" else f"As ``{called[8:]}``, of a list of tensors, by one call."
    return unconverted(found)


def _compressed(call: Callable[[Tensors], list[Any]], tensors: Tensors, compression: Any, device: str) -> list[Any]:
    with tf.device(device):
        small, contexts = zip(*(compression.compress(tf.convert_to_tensor(x)) for x in tensors), strict=True)
        return [*map(compression.decompress, call(small), contexts)]


# Allreduce.


def _reduced(form: Form, tensors: Tensors, op: int, *factors: float) -> list[Any]:
    options = reduction(op, *factors)
    return form.run(
        lambda x, more: core.allreduce(x, **options, **more),
        tensors,
        lambda grads: _reduced(form.of_gradient(), grads, op, *factors),
    )


def _reduced_slices(form: Form, slices: list[tf.IndexedSlices], op: int) -> list[tf.IndexedSlices]:
    def gathered(what: str) -> list[Any]:
        name = form.name and f"{form.name}.{what}"
        return _allgather(Form("grouped_allgather", name, form.process_set), [getattr(each, what) for each in slices])

    values, indices = gathered("values"), gathered("indices")
    if op == Average:
        values = [each / tf.cast(form.process_set.size(), each.dtype) for each in values]
    shapes = [each.dense_shape for each in slices]
    return [tf.IndexedSlices(*each) for each in zip(values, indices, shapes, strict=True)]


def _allreduce(
    form: Form,
    tensors: Tensors,
    average: bool | None,
    device_dense: str,
    device_sparse: str,
    compression: Any,
    op: int | None,
    **factors: float,
) -> list[Any]:
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
    op, factor = handle_average_backwards_compatibility(op, average), tuple(factors.values())
    sparse = [i for i, x in enumerate(tensors) if isinstance(x, tf.IndexedSlices)]
    dense = [i for i in range(len(tensors)) if i not in sparse]
    found: dict[int, Any] = {}
    if sparse:
        if op not in (Sum, Average) or set(factors.values()) != {1.0}:
            raise NotImplementedError(
                "tf.IndexedSlices have the operators hvd.Average and hvd.Sum only, and no factors; "
                "sparse_as_dense=True has all"
            )
        with tf.device(device_sparse):
            found.update(zip(sparse, _reduced_slices(form, [tensors[i] for i in sparse], op), strict=True))
    if dense:
        given = [tensors[i] for i in dense]
        reduced = _compressed(lambda x: _reduced(form, x, op, *factor), given, compression, device_dense)
        found.update(zip(dense, reduced, strict=True))
    return [found[i] for i in range(len(tensors))]


_ARGUMENTS = "average device_dense device_sparse compression op prescale_factor postscale_factor"
allreduce = _function(_allreduce, "allreduce", f"tensor {_ARGUMENTS} name process_set ignore_name_scope")
grouped_allreduce = _function(
    _allreduce, "grouped_allreduce", f"tensors {_ARGUMENTS} process_set ignore_name_scope name"
)


# All-gather.


def _allgather(form: Form, tensors: Tensors) -> list[Any]:
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
    rows: list[tf.Tensor] = []
    shapes: list[tf.Tensor] = []

    def forward(x: list[tf.Tensor], options: Options) -> list[Any]:
        shapes.extend(map(tf.shape, x))
        results, counts = core.all_gather(x, ragged=True, return_counts=True, **options)
        rows.extend(counts)
        return list(results)

    def gradient(grads: list[Any]) -> list[Any]:
        means = _reduced(form.of_gradient(), grads, Average, 1.0, 1.0)
        group = _job.group_of(form.process_set.process_set_id)
        return [
            tf.reshape(tf.split(mean, count, num=group.size)[group.rank], shape)
            for mean, count, shape in zip(means, rows, shapes, strict=True)
        ]

    return form.run(forward, tensors, gradient)


allgather = _function(_allgather, "allgather", "tensor name ignore_name_scope process_set")
grouped_allgather = _function(_allgather, "grouped_allgather", "tensors name ignore_name_scope process_set")


# Broadcast.


def _broadcast(form: Form, tensors: Tensors, root_rank: int) -> list[Any]:
    """Returns the tensor of one rank.

    The gradient on the root is the *average* of the ranks' gradients, and zero on the others.

    Args:
        tensor: Of the same shape and type on all ranks.
        root_rank: The rank that has the values: of the job, also in a process set.
        name: What the ranks match.
        ignore_name_scope: Not used.
        process_set: The ranks.
    """
    ranks = _job.current().sets.get(form.process_set.process_set_id or 0, [])
    root = ranks.index(root_rank) if root_rank in ranks else len(ranks)  # which the core refuses

    def gradient(grads: list[Any]) -> list[Any]:
        means = _reduced(form.of_gradient(), grads, Average, 1.0, 1.0)
        if rank() == root_rank:
            return means
        with tf.control_dependencies(means):  # a graph would drop the call, whose values nobody reads here
            return [tf.zeros_like(mean) for mean in means]

    return form.run(lambda x, options: core.broadcast(x, root, in_place=False, **options), tensors, gradient)


broadcast = _function(_broadcast, "broadcast", "tensor root_rank name ignore_name_scope process_set")


@unconverted
def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
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
    values = _broadcast(Form("broadcast_", name or "variables", process_set), listed, root_rank)
    done = [variable.assign(value) for variable, value in zip(listed, values, strict=True)]
    if tf.executing_eagerly():
        return [tf.convert_to_tensor(variable) for variable in listed]
    with tf.control_dependencies([each for each in done if each is not None]):
        return [tf.identity(value) for value in values]


# All-to-all.


def _alltoall(form: Form, tensors: Tensors, splits: Any) -> list[Any]:
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
    count = size_of(form.process_set.process_set_id)
    wanted = None if splits is None else tf.convert_to_tensor(splits)
    given = tf.convert_to_tensor(tensors[0])

    def forward(x: list[tf.Tensor], options: Options) -> list[Any]:
        (rows,) = x
        with tf.device("CPU:0"):
            extent = tf.shape(rows, tf.int64)[0] if rows.shape.rank != 0 else tf.constant(-1, tf.int64)
            sent = tf.fill([count], extent // count) if wanted is None else tf.cast(wanted, tf.int64)
            if wanted is not None:
                rows = rows[: tf.minimum(tf.reduce_sum(sent), extent)]
        result, received = core.all_to_all(rows, send_counts=sent, return_counts=True, **options)
        counts.append(received)
        return [result]

    def gradient(grads: list[Any]) -> list[Any]:
        ((back, _),) = _alltoall(form.of_gradient(), grads, counts[0])
        missing = tf.concat([tf.shape(given)[:1] - tf.shape(back)[:1], tf.shape(given)[1:]], 0)
        return [tf.concat([back, tf.zeros(missing, back.dtype)], 0)]  # zeros for rows that were not sent

    (result,) = form.run(forward, [given], gradient)
    if wanted is None:
        return [result]
    return [(result, tf.cast(counts[0], tf.int32) if counts else tf.identity(wanted))]


alltoall = _function(_alltoall, "alltoall", "tensor splits name ignore_name_scope process_set")


# Reduce-scatter: the first ranks get one row more.


def _reducescatter(
    form: Form, tensors: Tensors, device_dense: str, compression: Any, op: int, **factors: float
) -> list[Any]:
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
    count = size_of(form.process_set.process_set_id)
    reduced = reduction_of_rows(op, **factors)

    def forward(x: list[tf.Tensor], options: Options) -> Any:
        if any(each.shape.rank == 0 for each in x):
            raise dl_comm.ArgumentError("reducescatter takes tensors with at least one axis")
        with tf.device("CPU:0"):
            longer = count - 1 - tf.range(count, dtype=tf.int64)
            counts = [(tf.shape(each, tf.int64)[0] + longer) // count for each in x]
        return core.reduce_scatter(x, counts=counts, **reduced, **options)

    def gradient(grads: list[Any]) -> list[Any]:
        factor = (count if op == Sum else 1) * math.prod(factors.values())
        return _allgather(form.of_gradient(), [each * tf.cast(factor, each.dtype) for each in grads])

    return _compressed(lambda x: form.run(forward, x, gradient), tensors, compression, device_dense)


_REDUCE = "device_dense compression op"
_FACTORS = "prescale_factor postscale_factor"
reducescatter = _function(
    _reducescatter, "reducescatter", f"tensor {_REDUCE} name process_set ignore_name_scope {_FACTORS}", op=Average
)
grouped_reducescatter = _function(
    _reducescatter, "grouped_reducescatter", f"tensors {_REDUCE} process_set {_FACTORS}", op=Average
)


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
    return _number(_basics.local_rank, name)


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """The number of ranks of a process set when the op runs: int32. ``name``: that of the op."""
    return _number(functools.partial(size_of, process_set_id), name)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """The number of ranks on this host when the op runs: int32. ``name``: that of the op."""
    return _number(_basics.local_size, name)


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
