"""Horovod's collectives on torch tensors.

    handle = hvd.allreduce_async(gradient, name="layer1", op=hvd.Sum)
    rows = hvd.allgather(torch.ones(hvd.rank() + 1, 3))  # (sum of all ranks' rows, 3), on every rank
    total = hvd.synchronize(handle)

Of all: tensors are contiguous, of any shape, on the CPU or a GPU. The ranks of ``process_set`` must all make the call;
``name`` is what they match, and is numbered if it is None. The forms that end in ``_`` write into their tensor and
return it. ``*_async`` forms return a handle for ``poll`` and ``synchronize``; nobody else may use the tensors until
then. ``grouped_*`` take a list of tensors and return a list. The blocking forms that return new tensors are
differentiable; backward is collective, too.

Reductions take integers of 8, 32 and 64 bits and floating-point numbers, also bfloat16; the others every type.
``prescale_factor`` multiplies the input and ``postscale_factor`` the result: integers in float64, then truncated, and
types of 16 bits on the CPU in float32.

Raises, of all:
    ValueError: At the call: a tensor has a wrong type or is not contiguous, the name is in use, this rank is not in the
        process set, an argument is invalid, or Horovod is not initialized.
    HorovodInternalError: From the blocking form or ``synchronize``: the ranks differ, one was lost, or the deadline has
        passed. On every rank; the next call works, unless a rank was lost.

Thread rule: any thread may make calls, poll and synchronize. No function holds the GIL while it waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from horovod.common import _job, _names
from horovod.common import basics as _shared
from horovod.common._calls import poll, reduction, reduction_of_rows, synchronize
from horovod.common._names import *  # noqa: F403 (its __all__)
from horovod.common._names import Average, ProcessSet, Sum, global_process_set
from horovod.common.basics import HorovodBasics, barrier
from horovod.common.compression import NoneCompressor
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import place_of
from horovod.common.util import get_average_backwards_compatibility_fun
from horovod.torch._forms import Form, Tensors, core, form

_basics = HorovodBasics(__file__, "torch")
handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(HorovodBasics)

__all__ = [*_names.__all__, "HorovodInternalError", "barrier", "join", "poll", "sparse_allreduce_async", "synchronize"]
__all__ += ["allgather", "allgather_async", "grouped_allgather", "grouped_allgather_async"]
__all__ += ["allreduce", "allreduce_async", "allreduce_", "allreduce_async_", "alltoall", "alltoall_async"]
__all__ += ["grouped_allreduce", "grouped_allreduce_async", "grouped_allreduce_", "grouped_allreduce_async_"]
__all__ += ["broadcast", "broadcast_async", "broadcast_", "broadcast_async_"]
__all__ += ["reducescatter", "reducescatter_async", "grouped_reducescatter", "grouped_reducescatter_async"]


def _allreduce(
    form: Form,
    x: Tensors,
    average: bool | None,
    op: int | None,
    prescale_factor: float,
    postscale_factor: float,
    compression: Any = NoneCompressor,
) -> Any:
    """Returns the reduction of a tensor over the ranks.

    The gradient is reduced by the same operator and factors.

    Args:
        tensor: Of the same shape and type on all ranks.
        average: Deprecated: True for Average, False for Sum.
        name: What the ranks match.
        compression: How the values travel.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``.
        prescale_factor: A factor of the input.
        postscale_factor: A factor of the result.
        process_set: The ranks.

    Returns:
        A new tensor of the same shape and type.
    """
    op = handle_average_backwards_compatibility(op, average)
    options = reduction(op, prescale_factor, postscale_factor)

    def make(given: list[torch.Tensor]) -> Any:
        out, result = (given, lambda _: x) if form.in_place else (None, list)
        return form.make(core.allreduce, given, result, out=out, **options)

    def gradient(grads: list[torch.Tensor]) -> Any:
        return _allreduce(form.of_gradient(), grads, None, op, prescale_factor, postscale_factor)

    return form.run(make, x, gradient, compression)


_OF_ALLREDUCE = "average name compression op prescale_factor postscale_factor process_set"
allreduce = form(_allreduce, "allreduce", _OF_ALLREDUCE)
allreduce_async = form(_allreduce, "allreduce_async", _OF_ALLREDUCE)
allreduce_ = form(_allreduce, "allreduce_", _OF_ALLREDUCE)
allreduce_async_ = form(_allreduce, "allreduce_async_", _OF_ALLREDUCE)
grouped_allreduce = form(_allreduce, "grouped_allreduce", _OF_ALLREDUCE)
grouped_allreduce_async = form(_allreduce, "grouped_allreduce_async", _OF_ALLREDUCE)
grouped_allreduce_ = form(_allreduce, "grouped_allreduce_", _OF_ALLREDUCE)
grouped_allreduce_async_ = form(_allreduce, "grouped_allreduce_async_", _OF_ALLREDUCE)


def _allgather(form: Form, x: Tensors) -> Any:
    """Returns the tensors of all ranks, joined along the first axis in the order of the ranks.

    The gradient is this rank's rows of the *average* of the ranks' gradients.

    Args:
        tensor: Of the shape ``(n, *rest)``; ``n`` may differ between ranks.
        name: What the ranks match.
        process_set: The ranks.

    Returns:
        A new tensor of the shape ``(sum of n, *rest)``.
    """
    rows: list[list[int]] = []

    def result(found: tuple[list[torch.Tensor], list[list[int]]]) -> list[torch.Tensor]:
        rows[:] = found[1]
        return found[0]

    def make(given: list[torch.Tensor]) -> Any:
        return form.make(core.all_gather, given, result, ragged=True, return_counts=True)

    def gradient(grads: list[torch.Tensor]) -> list[torch.Tensor]:
        means = _allreduce(form.of_gradient(), grads, None, Average, 1.0, 1.0)
        here = form.process_set.rank() or 0
        return [
            mean.narrow(0, sum(counts[:here]), counts[here]).reshape(tensor.shape)
            for mean, counts, tensor in zip(means, rows, x, strict=True)
        ]

    return form.run(make, x, gradient)


allgather = form(_allgather, "allgather", "name process_set")
allgather_async = form(_allgather, "allgather_async", "name process_set")
grouped_allgather = form(_allgather, "grouped_allgather", "name process_set")
grouped_allgather_async = form(_allgather, "grouped_allgather_async", "name process_set")


def _broadcast(form: Form, x: Tensors, root_rank: int) -> Any:
    """Returns the tensor of one rank.

    The gradient on the root is the *average* of the ranks' gradients, and zero on the others.

    Args:
        tensor: Of the same shape and type on all ranks.
        root_rank: The rank that has the values: of the job, also in a process set.
        name: What the ranks match.
        process_set: The ranks.

    Returns:
        A new tensor.
    """

    def call(given: list[torch.Tensor], async_op: bool = False, **options: Any) -> Any:
        # Started, also if it blocks: the core's blocking broadcast is not the call that others may have started.
        work = core.broadcast(given, root, async_op=True, **options)
        return work if async_op else work.wait()

    def make(given: list[torch.Tensor]) -> Any:
        target = given if form.in_place else [each.clone() for each in given]
        return form.make(call, target, lambda _: x if form.in_place else target)

    def gradient(grads: list[torch.Tensor]) -> list[torch.Tensor]:
        means = _allreduce(form.of_gradient(), grads, None, Average, 1.0, 1.0)
        return [mean if _job.current().rank == root_rank else torch.zeros_like(mean) for mean in means]

    _job.group_of(form.process_set.process_set_id)  # raises if this rank is not in there
    root = place_of(root_rank, form.process_set)
    return form.run(make, x, gradient)


broadcast = form(_broadcast, "broadcast", "root_rank name process_set")
broadcast_async = form(_broadcast, "broadcast_async", "root_rank name process_set")
broadcast_ = form(_broadcast, "broadcast_", "root_rank name process_set")
broadcast_async_ = form(_broadcast, "broadcast_async_", "root_rank name process_set")


def _send_counts(tensor: torch.Tensor, splits: Any, count: int) -> list[int]:
    """The rows for each rank. Raises ValueError if they do not fit the tensor."""
    if not tensor.dim():
        raise ValueError("alltoall takes tensors with at least one axis")
    length = tensor.shape[0]
    if splits is None:
        if length % count:
            raise ValueError(f"the first axis has {length} rows, no multiple of the {count} ranks: give splits")
        return [length // count] * count
    given = torch.as_tensor(splits)
    if given.is_floating_point() or given.dtype is torch.bool or given.dim() != 1 or len(given) != count:
        raise ValueError(f"splits is {splits} (expected {count} integers, one for each rank)")
    found: list[int] = given.tolist()
    if min(found) < 0 or sum(found) > length:
        raise ValueError(f"splits is {found}; the first axis has {length} rows")
    return found


def _alltoall(form: Form, x: Tensors, splits: Any) -> Any:
    """Sends rows of a tensor to every rank, and returns those from every rank.

    The gradient goes back to where its rows came from.

    Args:
        tensor: Of the shape ``(n, *rest)``; ``n`` may differ between ranks.
        splits: How many rows each rank gets, in the order of the ranks: a tensor of integers, or a list; their sum is
            at most ``n``. None: as many each.
        name: What the ranks match.
        process_set: The ranks.

    Returns:
        The rows, in the order of the ranks that sent them. With ``splits`` also how many came from each: int32, on the
        device of ``splits``.
    """
    form = form if splits is None else form._replace(unwrap=tuple)
    counts: list[torch.Tensor] = []
    device = splits.device if isinstance(splits, torch.Tensor) else "cpu"

    def result(found: tuple[torch.Tensor, list[int]]) -> list[torch.Tensor]:
        counts[:] = [torch.tensor(found[1], dtype=torch.int32, device=device)]
        return [found[0], *counts]

    def make(given: list[torch.Tensor]) -> Any:
        sent = _send_counts(given[0], splits, _job.group_of(form.process_set.process_set_id).size)
        rows = given[0] if sum(sent) == given[0].shape[0] else given[0][: sum(sent)]
        return form.make(core.all_to_all, rows, result, send_counts=sent, return_counts=True)

    def gradient(grads: list[torch.Tensor]) -> list[torch.Tensor]:
        back, _ = _alltoall(form.of_gradient(), grads[:1], counts[0])
        if back.shape[0] < x[0].shape[0]:  # rows that were not sent
            back = torch.cat([back, back.new_zeros((x[0].shape[0] - back.shape[0], *back.shape[1:]))])
        return [back]

    return form.run(make, x, gradient)


alltoall = form(_alltoall, "alltoall", "splits name process_set")
alltoall_async = form(_alltoall, "alltoall_async", "splits name process_set")


def _reducescatter(
    form: Form, x: Tensors, op: int, prescale_factor: float, postscale_factor: float, compression: Any = NoneCompressor
) -> Any:
    """Returns this rank's rows of the reduction of a tensor over the ranks. The first ranks may get one row more.

    The gradients are gathered, multiplied by the number of ranks for Sum, and by the factors; for Average they are not
    divided.

    Args:
        tensor: Of the shape ``(n, *rest)``, the same on all ranks. If ``n`` is no multiple of the number of ranks, the
            first ranks get one row more.
        name: What the ranks match.
        compression: How the values travel.
        op: ``Average`` or ``Sum``.
        process_set: The ranks.
        prescale_factor: A factor of the input.
        postscale_factor: A factor of the result.

    Returns:
        A new tensor.

    Raises:
        RuntimeError: Of another operator, or of a tensor without axes, beside the errors of all collectives.
    """

    def make(given: list[torch.Tensor]) -> Any:
        options = reduction_of_rows(op, *factors)
        if not all(tensor.dim() for tensor in given):
            raise RuntimeError("reducescatter takes tensors with at least one axis")
        size = _job.group_of(form.process_set.process_set_id).size
        if any(tensor.shape[0] % size for tensor in given):
            longer = range(size - 1, -1, -1)
            options["counts"] = [[(tensor.shape[0] + more) // size for more in longer] for tensor in given]
        return form.make(core.reduce_scatter, given, list, **options)

    def gradient(grads: list[torch.Tensor]) -> Any:
        factor = (form.process_set.size() or 1 if op == Sum else 1) * prescale_factor * postscale_factor
        return _allgather(form.of_gradient(), [grad * factor for grad in grads])

    factors = prescale_factor, postscale_factor
    return form.run(make, x, gradient, compression)


_OF_REDUCESCATTER = "name compression op process_set prescale_factor postscale_factor"
reducescatter = form(_reducescatter, "reducescatter", _OF_REDUCESCATTER, op=Average)
reducescatter_async = form(_reducescatter, "reducescatter_async", _OF_REDUCESCATTER, op=Average)
grouped_reducescatter = form(_reducescatter, "grouped_reducescatter", _OF_REDUCESCATTER, op=Average)
grouped_reducescatter_async = form(_reducescatter, "grouped_reducescatter_async", _OF_REDUCESCATTER, op=Average)


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Starts the sum or average of sparse tensors, by two all-gathers: of the indices and of the values.

    Args:
        tensor: A sparse tensor in the COO layout, of the same shape and type on all ranks.
        name: What the ranks match.
        op: ``Sum`` or ``Average``.
        process_set: The ranks.

    Returns:
        A function that waits for the result and returns it: a sparse tensor, not coalesced.
    """
    if op not in (Average, Sum):
        raise NotImplementedError("sparse tensors have sums and averages only")
    places = tensor._indices().transpose(0, 1).contiguous()
    indices = allgather_async(places, f"{name}.indices", process_set)
    values = allgather_async(tensor._values().contiguous(), f"{name}.values", process_set)

    def result() -> torch.Tensor:
        found = synchronize(values)
        if op == Average:
            found = found / process_set.size()
        joined: torch.Tensor = torch.sparse_coo_tensor(
            synchronize(indices).transpose(0, 1), found, tensor.size(), dtype=tensor.dtype, check_invariants=False
        )
        return joined

    return result


def join(device: int = -1) -> int:
    """Contributes zeros to the other ranks' sums and averages until all ranks have joined. Collective.

    For ranks with less data than others. Until then the other ranks' minima, maxima, products, Adasum, and other
    collectives raise HorovodInternalError.

    Args:
        device: Not used.

    Returns:
        The rank that joined last.
    """
    return _shared.join()
