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

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

import dl_comm.torch
from horovod.common import basics as _shared
from horovod.common._calls import All, Call, Then, With, poll, synchronize
from horovod.common.basics import HorovodBasics, barrier
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from horovod.common.util import get_average_backwards_compatibility_fun
from horovod.torch.compression import Compression

core: Any = dl_comm.torch
"""Whose overloads do not know options of names."""
_basics = HorovodBasics(__file__, "torch")
init, shutdown, is_initialized = _basics.init, _basics.shutdown, _basics.is_initialized
start_timeline, stop_timeline = _basics.start_timeline, _basics.stop_timeline
size, local_size, cross_size = _basics.size, _basics.local_size, _basics.cross_size
rank, local_rank, cross_rank = _basics.rank, _basics.local_rank, _basics.cross_rank
is_homogeneous = _basics.is_homogeneous
mpi_threads_supported, mpi_enabled, mpi_built = _basics.mpi_threads_supported, _basics.mpi_enabled, _basics.mpi_built
gloo_enabled, gloo_built, nccl_built = _basics.gloo_enabled, _basics.gloo_built, _basics.nccl_built
ddl_built, ccl_built, cuda_built, rocm_built = (
    _basics.ddl_built,
    _basics.ccl_built,
    _basics.cuda_built,
    _basics.rocm_built,
)
Average, Sum, Adasum, Min, Max, Product = range(6)
handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(_basics)

__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

_OPERATORS = {Average: "mean", Sum: "sum", Adasum: "adasum", Min: "min", Max: "max", Product: "product"}
Tensors = Sequence[torch.Tensor]


# The forms that all collectives share.


def _checked(x: Any, *, grouped: bool) -> list[torch.Tensor]:
    """Returns the tensors of a call, detached from the graph."""
    found = []
    for tensor in x if grouped else (x,):
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"expected a tensor, not a {type(tensor).__name__}")
        if tensor.layout is not torch.strided or not tensor.is_contiguous():
            raise ValueError("Tensor is required to be contiguous.")
        found.append(tensor.detach() if tensor.requires_grad else tensor)
    if not found:
        raise ValueError("the list has no tensors")
    return found


class _Differentiable(torch.autograd.Function):
    """A collective: ``run`` gets the tensors, ``gradient`` the contiguous gradients of the results."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], gradient: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        ctx.gradient = gradient
        return run(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, *ctx.gradient([grad.contiguous() for grad in grads])


def _differentiable(run: Callable[..., Any], gradient: Callable[..., Any], tensors: Tensors) -> Any:
    if torch.is_grad_enabled() and any(getattr(tensor, "requires_grad", False) for tensor in tensors):
        return _Differentiable.apply(run, gradient, *tensors)
    return run(*tensors)


def _of_gradient(name: str | None) -> str | None:
    return None if name is None else f"{name}.gradient"


# Factors. The core has them for sums of floating-point numbers; all else is here.


def _scale(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    if factor == 1.0:
        return tensor
    wide = tensor.dtype
    if not tensor.is_floating_point():
        wide = torch.float64
    elif tensor.element_size() == 2 and tensor.device.type == "cpu":
        wide = torch.float32
    return (tensor.to(wide) * factor).to(tensor.dtype)


def _factors(
    op: int, before: float, after: float, count: int, tensors: list[torch.Tensor]
) -> tuple[str, dict[str, float], list[torch.Tensor], float]:
    """Returns the core's operator and factors, the tensors to reduce, and the factor of the results."""
    if before == 1.0 == after:
        try:
            return _OPERATORS[op], {}, tensors, 1.0
        except KeyError:
            raise ValueError(f"invalid op: {op!r} (expected hvd.Average, Sum, Adasum, Min, Max or Product)") from None
    if op == Average:
        op, after = Sum, after / count
    if op == Sum and all(tensor.is_floating_point() for tensor in tensors):
        return "sum", {"prescale": float(before), "postscale": float(after)}, tensors, 1.0
    return _OPERATORS[op], {}, [_scale(tensor, before) for tensor in tensors], after


# Allreduce.


def _allreduce(
    kind: str,
    x: Any,
    name: str | None,
    op: int,
    factors: tuple[float, float],
    process_set: ProcessSet,
    in_place: bool,
    is_async: bool = False,
) -> Any:
    grouped = kind == "grouped_allreduce"
    tensors = _checked(x, grouped=grouped)
    call = Call(kind, name, process_set)
    operator, options, inputs, scale = _factors(op, *factors, call.group.size, tensors)
    direct = inputs is tensors and scale == 1.0

    def finished(result: Any) -> Any:
        results = result if grouped else [result]
        if not direct:
            results = [_scale(each, scale) for each in results]
            if in_place:
                for tensor, each in zip(tensors, results, strict=True):
                    tensor.copy_(each)
        if in_place:
            return x
        return results if grouped else results[0]

    given = inputs if grouped else inputs[0]
    out = given if in_place and direct else None
    if not is_async:
        return finished(call.run(core.allreduce, given, operator, out=out, **call.options(), **options))
    return call.start(
        lambda: With(core.allreduce(given, operator, out=out, async_op=True, **call.options(), **options), finished)
    )


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts ``allreduce``; returns a handle."""
    op = handle_average_backwards_compatibility(op, average)
    return int(_allreduce("allreduce", tensor, name, op, (prescale_factor, postscale_factor), process_set, False, True))


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
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
    factors = prescale_factor, postscale_factor
    small, context = compression.compress(tensor)
    result = _differentiable(
        lambda x: _allreduce("allreduce", x, name, op, factors, process_set, False),
        lambda grads: [allreduce(grads[0], None, _of_gradient(name), Compression.none, op, *factors, process_set)],
        [small],
    )
    found: torch.Tensor = compression.decompress(result, context)
    return found


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts ``allreduce_``; returns a handle."""
    op = handle_average_backwards_compatibility(op, average)
    return int(_allreduce("allreduce", tensor, name, op, (prescale_factor, postscale_factor), process_set, True, True))


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Replaces a tensor by its reduction over the ranks, as ``allreduce``; returns it. Not differentiable."""
    op = handle_average_backwards_compatibility(op, average)
    factors = prescale_factor, postscale_factor
    reduced: torch.Tensor = _allreduce("allreduce", tensor, name, op, factors, process_set, True)
    return reduced


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts ``grouped_allreduce``; returns a handle."""
    op, factors = handle_average_backwards_compatibility(op, average), (prescale_factor, postscale_factor)
    return int(_allreduce("grouped_allreduce", tensors, name, op, factors, process_set, False, True))


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Returns the reductions of a list of tensors, as one call; as ``allreduce``."""
    op = handle_average_backwards_compatibility(op, average)
    factors = prescale_factor, postscale_factor
    small = [compression.compress(tensor) for tensor in tensors]
    results = _differentiable(
        lambda *x: tuple(_allreduce("grouped_allreduce", x, name, op, factors, process_set, False)),
        lambda grads: grouped_allreduce(grads, None, _of_gradient(name), Compression.none, op, *factors, process_set),
        [tensor for tensor, _ in small],
    )
    return [compression.decompress(result, context) for result, (_, context) in zip(results, small, strict=True)]


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts ``grouped_allreduce_``; returns a handle."""
    op, factors = handle_average_backwards_compatibility(op, average), (prescale_factor, postscale_factor)
    return int(_allreduce("grouped_allreduce", tensors, name, op, factors, process_set, True, True))


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensors:
    """Replaces a list of tensors by their reductions, as one call; returns it."""
    op = handle_average_backwards_compatibility(op, average)
    factors = prescale_factor, postscale_factor
    reduced: Tensors = _allreduce("grouped_allreduce", tensors, name, op, factors, process_set, True)
    return reduced


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


# All-gather: the ranks first exchange the lengths of the first axes.


def _row_counts(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([[tensor.shape[0] if tensor.dim() else 1 for tensor in tensors]])


def _gather_works(call: Call, tensors: list[torch.Tensor], rows: torch.Tensor) -> All:
    """Starts the second stage: one call, or one for each tensor if the lengths differ."""
    if bool((rows == rows[0]).all()):
        return All([core.all_gather(tensors, async_op=True, **call.options())])
    return All(
        [
            core.all_gather([tensor], counts=rows[:, i].tolist(), async_op=True, **call.options(f"_{i}" if i else ""))
            for i, tensor in enumerate(tensors)
        ]
    )


def _allgather(kind: str, x: Any, name: str | None, process_set: ProcessSet, rows: list[Any] | None = None) -> Any:
    """Gathers; appends the lengths of all ranks to ``rows``. ``rows`` is None: starts it."""
    grouped = kind == "grouped_allgather"
    tensors = _checked(x, grouped=grouped)
    call = Call(kind, name, process_set)
    extents = call.options(": extents")

    def finished(results: list[list[torch.Tensor]]) -> Any:
        joined = [each for result in results for each in result]
        return joined if grouped else joined[0]

    def started() -> With:
        first = core.all_gather(_row_counts(tensors), async_op=True, **extents)
        return With(Then(first, lambda found: _gather_works(call, tensors, found)), finished)

    def run() -> Any:
        found = core.all_gather(_row_counts(tensors), **extents)
        assert rows is not None
        rows.append(found)
        if len(tensors) > 1:
            return finished(_gather_works(call, tensors, found).wait())
        is_even = bool((found == found[0]).all())
        return finished([core.all_gather(tensors, counts=None if is_even else found[:, 0].tolist(), **call.options())])

    return call.start(started) if rows is None else call.run(run)


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Starts ``allgather``; returns a handle."""
    return int(_allgather("allgather", tensor, name, process_set))


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts ``grouped_allgather``; returns a handle."""
    return int(_allgather("grouped_allgather", tensors, name, process_set))


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Returns the tensors of all ranks, joined along the first axis in the order of the ranks.

    The gradient is this rank's rows of the *average* of the ranks' gradients.

    Args:
        tensor: Of the shape ``(n, *rest)``; ``n`` may differ between ranks.
        name: What the ranks match.
        process_set: The ranks.

    Returns:
        A new tensor of the shape ``(sum of n, *rest)``.
    """
    rows: list[torch.Tensor] = []
    found: torch.Tensor = _differentiable(
        lambda x: _allgather("allgather", x, name, process_set, rows),
        lambda grads: _own_rows(
            [allreduce(grads[0], op=Average, name=_of_gradient(name), process_set=process_set)],
            rows,
            [tensor],
            process_set,
        ),
        [tensor],
    )
    return found


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Gathers a list of tensors, as ``allgather``."""
    rows: list[torch.Tensor] = []
    found = _differentiable(
        lambda *x: tuple(_allgather("grouped_allgather", x, name, process_set, rows)),
        lambda grads: _own_rows(
            grouped_allreduce(grads, op=Average, name=_of_gradient(name), process_set=process_set),
            rows,
            tensors,
            process_set,
        ),
        tensors,
    )
    return list(found)


def _own_rows(
    grads: list[torch.Tensor], rows: list[torch.Tensor], tensors: Tensors, process_set: ProcessSet
) -> list[torch.Tensor]:
    """This rank's rows of each gradient of a gathered tensor."""
    here = process_set.rank()
    begins = rows[0][:here].sum(0).tolist()
    counts = rows[0][here].tolist()
    return [
        grad.narrow(0, begin, count).reshape(tensor.shape)
        for grad, begin, count, tensor in zip(grads, begins, counts, tensors, strict=True)
    ]


# Broadcast.


def _broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    in_place: bool,
    is_async: bool = False,
) -> Any:
    (given,) = _checked(tensor, grouped=False)
    call = Call("broadcast", name, process_set)
    ranks = process_set.ranks or []
    if root_rank not in ranks:
        call.end()
        raise ValueError(f"root_rank is {root_rank}, which is not in the process set of the ranks {ranks}")
    root = ranks.index(root_rank)
    target = given if in_place else given.clone()
    result = tensor if in_place else target
    if not is_async:
        call.run(core.broadcast, target, root, **call.options())
        return result
    return call.start(lambda: With(core.broadcast(target, root, async_op=True, **call.options()), lambda _: result))


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts ``broadcast``; returns a handle."""
    return int(_broadcast(tensor, root_rank, name, process_set, False, True))


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
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

    def gradient(grads: list[torch.Tensor]) -> list[torch.Tensor]:
        mean = allreduce(grads[0], op=Average, name=_of_gradient(name), process_set=process_set)
        return [mean if rank() == root_rank else mean * 0]

    found: torch.Tensor = _differentiable(
        lambda x: _broadcast(x, root_rank, name, process_set, False), gradient, [tensor]
    )
    return found


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts ``broadcast_``; returns a handle."""
    return int(_broadcast(tensor, root_rank, name, process_set, True, True))


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Replaces a tensor by that of one rank, as ``broadcast``; returns it. Not differentiable."""
    found: torch.Tensor = _broadcast(tensor, root_rank, name, process_set, True)
    return found


# All-to-all: the ranks first exchange how many rows each gets.


def _send_counts(tensor: torch.Tensor, splits: Any, count: int) -> list[int]:
    """The rows for each rank. Raises ValueError if they do not fit the tensor."""
    if not tensor.dim():
        raise ValueError("alltoall takes tensors with at least one axis")
    length = tensor.shape[0]
    if splits is None:
        if length % count:
            raise ValueError(f"the first axis has {length} rows, no multiple of the {count} ranks: give splits")
        return [length // count] * count
    given = splits if isinstance(splits, torch.Tensor) else torch.as_tensor(splits)
    if given.is_floating_point() or given.dtype is torch.bool or given.dim() != 1 or len(given) != count:
        raise ValueError(f"splits is {splits} (expected {count} integers, one for each rank)")
    found: list[int] = given.tolist()
    if min(found) < 0 or sum(found) > length:
        raise ValueError(f"splits is {found}; the first axis has {length} rows")
    return found


def _alltoall(
    tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet, is_async: bool = False
) -> Any:
    (given,) = _checked(tensor, grouped=False)
    call = Call("alltoall", name, process_set)
    try:
        sent = _send_counts(given, splits, call.group.size)
    except ValueError:
        call.end()
        raise
    rows = given if sum(sent) == given.shape[0] else given[: sum(sent)]
    counts, lengths = torch.tensor(sent), call.options(": counts")
    device = splits.device if isinstance(splits, torch.Tensor) else "cpu"

    def finished(result: torch.Tensor, received: list[int]) -> Any:
        return result if splits is None else (result, torch.tensor(received, dtype=torch.int32, device=device))

    def second(found: torch.Tensor) -> With:
        received = found.tolist()
        work = core.all_to_all(rows, send_counts=sent, receive_counts=received, async_op=True, **call.options())
        return With(work, lambda result: finished(result, received))

    def run() -> Any:
        received = core.all_to_all(counts, **lengths).tolist()
        found = core.all_to_all(rows, send_counts=sent, receive_counts=received, **call.options())
        return finished(found, received)

    if is_async:
        return call.start(lambda: Then(core.all_to_all(counts, async_op=True, **lengths), second))
    return call.run(run)


def alltoall_async(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts ``alltoall``; returns a handle."""
    return int(_alltoall(tensor, splits, name, process_set, True))


def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
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
    received: list[torch.Tensor] = []

    def run(x: torch.Tensor) -> Any:
        wanted = _send_counts(x, splits, process_set.size() or 1)
        result, counts = _alltoall(x, wanted, name, process_set)
        received.append(counts)
        return result

    def gradient(grads: list[torch.Tensor]) -> list[torch.Tensor]:
        back, _ = alltoall(grads[0], splits=received[0], name=_of_gradient(name), process_set=process_set)
        if back.shape[0] < tensor.shape[0]:  # rows that were not sent
            back = torch.cat([back, back.new_zeros((tensor.shape[0] - back.shape[0], *back.shape[1:]))])
        return [back]

    result = _differentiable(run, gradient, [tensor])
    return result if splits is None else (result, received[0])


# Reduce-scatter: the first ranks get one row more.


def _scatter_works(
    call: Call, operator: str, options: dict[str, float], tensors: list[torch.Tensor], async_op: bool
) -> list[Any]:
    """Makes or starts one call, or one for each tensor if the rows are no multiple of the ranks.

    The first has the plain name in both cases, so that ranks that differ notice it at once.
    """
    scatter, count = functools.partial(core.reduce_scatter, op=operator, async_op=async_op), call.group.size
    if all(tensor.shape[0] % count == 0 for tensor in tensors):
        return [scatter(tensors, **options, **call.options())]
    made = []
    for i, tensor in enumerate(tensors):
        least, more = divmod(tensor.shape[0], count)
        rows = [least + (place < more) for place in range(count)]
        made.append(scatter([tensor], counts=rows, **options, **call.options(f"_{i}" if i else "")))
    return made


def _reducescatter(
    kind: str,
    x: Any,
    name: str | None,
    op: int,
    process_set: ProcessSet,
    factors: tuple[float, float],
    is_async: bool = False,
) -> Any:
    grouped = kind == "grouped_reducescatter"
    tensors = _checked(x, grouped=grouped)
    if op not in (Average, Sum):
        raise NotImplementedError("reducescatter has the operators hvd.Average and hvd.Sum only")
    if not all(tensor.dim() for tensor in tensors):
        raise RuntimeError("reducescatter takes tensors with at least one axis")
    call = Call(kind, name, process_set)
    operator, options, inputs, scale = _factors(op, *factors, call.group.size, tensors)

    def finished(results: list[list[torch.Tensor]]) -> Any:
        blocks = [_scale(each, scale) for result in results for each in result]
        return blocks if grouped else blocks[0]

    if is_async:
        return call.start(lambda: With(All(_scatter_works(call, operator, options, inputs, True)), finished))
    return call.run(lambda: finished(_scatter_works(call, operator, options, inputs, False)))


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts ``reducescatter``; returns a handle."""
    factors = prescale_factor, postscale_factor
    return int(_reducescatter("reducescatter", tensor, name, op, process_set, factors, True))


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts ``grouped_reducescatter``; returns a handle."""
    factors = prescale_factor, postscale_factor
    return int(_reducescatter("grouped_reducescatter", tensors, name, op, process_set, factors, True))


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Returns this rank's rows of the reduction of a tensor over the ranks.

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
    small, context = compression.compress(tensor)
    factors = prescale_factor, postscale_factor
    result = _differentiable(
        lambda x: _reducescatter("reducescatter", x, name, op, process_set, factors),
        lambda grads: [
            allgather(grads[0] * _factor_of_gradient(op, factors, process_set), _of_gradient(name), process_set)
        ],
        [small],
    )
    found: torch.Tensor = compression.decompress(result, context)
    return found


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduces and scatters a list of tensors, as ``reducescatter``."""
    small = [compression.compress(tensor) for tensor in tensors]
    factors = prescale_factor, postscale_factor
    results = _differentiable(
        lambda *x: tuple(_reducescatter("grouped_reducescatter", x, name, op, process_set, factors)),
        lambda grads: grouped_allgather(
            [grad * _factor_of_gradient(op, factors, process_set) for grad in grads], _of_gradient(name), process_set
        ),
        [tensor for tensor, _ in small],
    )
    return [compression.decompress(result, context) for result, (_, context) in zip(results, small, strict=True)]


def _factor_of_gradient(op: int, factors: tuple[float, float], process_set: ProcessSet) -> float:
    return (process_set.size() or 1 if op == Sum else 1) * factors[0] * factors[1]


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
