"""Collectives on torch tensors and numbers, on all ranks or on a group.

Names, arguments and meaning are those of the functions of `dl_comm` for NumPy arrays. Without `out` and `async_op` the
functions are differentiable, and `torch.compile` takes them.

Thread rule: any thread may call every function; they wait without the GIL. The ranks of the group must all call them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch

from dl_comm import _groups
from dl_comm._checks import checked_flag, checked_float, seconds
from dl_comm._errors import ArgumentError
from dl_comm._groups import Group
from dl_comm._types import Arrays, Operator, Values
from dl_comm.torch import _autograd as _autograd
from dl_comm.torch import _ops
from dl_comm.torch._arguments import (
    call_name,
    carried,
    checked_rank,
    first,
    item,
    listed_counts,
    nothing,
    operator_name,
    place,
    refuse_gradients,
    tensors_of,
)
from dl_comm.torch._levels import allreduce_by_levels, steps_of
from dl_comm.torch._work import Work

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from dl_comm._types import Exchanged, Options, Ragged, Scaled, ScaledBlocks, Scattered


class _Collective(NamedTuple):
    """The ops of a collective; see torch_ops/collectives.cc."""

    new: Callable[..., Any]
    no_grad: Callable[..., Any]
    out: Callable[..., Any]
    start: Callable[..., Any]


def _collective(name: str) -> _Collective:
    return _Collective(*(getattr(_ops.ops, name + suffix).default for suffix in ("", "_no_grad", "_out", "_start")))


_ALLREDUCE = _collective("allreduce")
_BROADCAST = _collective("broadcast")
_REDUCE = _collective("reduce")
_ALL_GATHER = _collective("all_gather")
_GATHER = _collective("gather")
_SCATTER = _collective("scatter")
_REDUCE_SCATTER = _collective("reduce_scatter")
_ALL_TO_ALL = _collective("all_to_all")
_MOVING = (_ALL_GATHER, _GATHER, _SCATTER, _ALL_TO_ALL)


@overload
def allreduce(
    x: Values,
    op: Operator = ...,
    *,
    group: Group | None = ...,
    async_op: Literal[False] = ...,
    **options: Unpack[Scaled],
) -> Values: ...


@overload
def allreduce(
    x: Values, op: Operator = ..., *, group: Group | None = ..., async_op: Literal[True], **options: Unpack[Scaled]
) -> Work[Values]: ...


@overload
def allreduce(
    x: Values, op: Operator = ..., *, group: Group | None = ..., async_op: bool = ..., **options: Unpack[Scaled]
) -> Values | Work[Values]: ...


def allreduce(
    x: Any,
    op: Operator = "sum",
    *,
    group: Group | None = None,
    name: str | None = None,
    timeout: float | None = None,
    out: Any = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: bool = False,
) -> Any:
    """Reduce tensors element by element over the ranks; every rank gets the result. Collective.

    Args:
        x: A tensor, a number, or a list of tensors, which is one call. Shapes and types are the same on all ranks.
        op: `"sum"`, `"mean"`, `"min"`, `"max"`, `"product"`, `"bit_and"`, `"bit_or"`, `"bit_xor"` or `"adasum"`.
            `docs/collectives.md` lists the element types of each; means of integers round toward zero.
        group: The ranks that take part; None: all.
        name: A name that must be the same on all ranks; error messages contain it.
        timeout: The deadline in seconds (0: no limit), instead of the group's.
        out: Contiguous tensors for the results, like `x`; `out=x` works in place. Not differentiable.
        prescale: A factor of every input of a sum of floating-point numbers.
        postscale: A factor of the sum.
        async_op: Return a `Work` at once. Until it has ended, nobody else may use the tensors. Not differentiable.

    Returns:
        `out`, or new contiguous tensors or a number of the type of `x`; with `async_op` a `Work` of it.

    Raises:
        ArgumentError: An argument is invalid; or `out` or `async_op` with tensors that require gradients.
        DTypeError: `x` is not a tensor or number, or `op` does not take its element type.
        MismatchError: The ranks issued different collectives. Nothing was written, and the next call works.
        TimeoutError: The ranks in the message missed the deadline; the group refuses further calls.
        PeerLostError: A rank of the group has ended; the group refuses further calls.
        StateError: `init` was not called, or `finalize` was.
    """
    world = _groups._world if group is None and not _groups.is_routed() else None
    is_plain = type(x) is torch.Tensor and (out is None or out is x) and name is None and timeout is None
    is_plain = is_plain and type(prescale) is float is type(postscale) and async_op is False
    if world is not None and is_plain and not _ops.differentiates(given := [x]):
        # The general way takes a microsecond more.
        short = (0, world.rank, world.size, operator_name(op), prescale, postscale, "", -1.0)
        if out is None:
            return _ops.call(_ALLREDUCE.no_grad, given, *short)[0]
        _ops.call(_ALLREDUCE.out, given, given, *short)
        torch.autograd.graph.increment_version(x)
        return x
    if group is None and _groups.is_routed() and async_op is False:
        tensors, wrap = tensors_of(x)
        factors = (checked_float("prescale", prescale), checked_float("postscale", postscale))
        steps = steps_of(tensors, operator_name(op), *factors)
        if steps is not None:
            results = allreduce_by_levels(steps, tensors, out, op, call_name(name), seconds(timeout))
            return wrap(results) if out is None else results
    arguments = (
        *place(group, 1, x, async_op),
        operator_name(op),
        checked_float("prescale", prescale),
        checked_float("postscale", postscale),
        call_name(name),
        seconds(timeout),
    )
    return _run(_ALLREDUCE, x, out, async_op, arguments)


@overload
def reduce(
    x: Values,
    root: int = ...,
    op: Operator = ...,
    *,
    group: Group | None = ...,
    async_op: Literal[False] = ...,
    **options: Unpack[Options],
) -> Values | None: ...


@overload
def reduce(
    x: Values,
    root: int = ...,
    op: Operator = ...,
    *,
    group: Group | None = ...,
    async_op: Literal[True],
    **options: Unpack[Options],
) -> Work[Values | None]: ...


@overload
def reduce(
    x: Values,
    root: int = ...,
    op: Operator = ...,
    *,
    group: Group | None = ...,
    async_op: bool = ...,
    **options: Unpack[Options],
) -> Values | None | Work[Values | None]: ...


def reduce(
    x: Any,
    root: int = 0,
    op: Operator = "sum",
    *,
    group: Group | None = None,
    name: str | None = None,
    timeout: float | None = None,
    out: Any = None,
    async_op: bool = False,
) -> Any:
    """Reduce tensors over the ranks; rank `root` of the group gets the result. Collective.

    Arguments and errors are those of `allreduce` (without `"adasum"`); `out` is used on the root only.

    Returns:
        On the root as `allreduce`. On the other ranks None; if `x` requires gradients, an empty tensor, which carries
        the graph: add its sum to the loss, because backward is collective too.
    """
    arguments = (
        *place(group, 4, x, async_op),
        operator_name(op),
        1.0,
        1.0,
        checked_rank(root),
        call_name(name),
        seconds(timeout),
    )
    return _run(_REDUCE, x, out, async_op, arguments, root)


@overload
def all_gather(
    x: Arrays, *, group: Group | None = ..., async_op: Literal[False] = ..., **options: Unpack[Ragged]
) -> Arrays: ...


@overload
def all_gather(
    x: Arrays, *, group: Group | None = ..., async_op: Literal[True], **options: Unpack[Ragged]
) -> Work[Arrays]: ...


@overload
def all_gather(
    x: Arrays, *, group: Group | None = ..., async_op: bool = ..., **options: Unpack[Ragged]
) -> Arrays | Work[Arrays]: ...


@overload
def all_gather(
    x: complex, *, group: Group | None = ..., async_op: Literal[False] = ..., **options: Unpack[Ragged]
) -> torch.Tensor: ...


@overload
def all_gather(
    x: complex, *, group: Group | None = ..., async_op: Literal[True], **options: Unpack[Ragged]
) -> Work[torch.Tensor]: ...


@overload
def all_gather(
    x: complex, *, group: Group | None = ..., async_op: bool = ..., **options: Unpack[Ragged]
) -> torch.Tensor | Work[torch.Tensor]: ...


def all_gather(
    x: Any,
    *,
    group: Group | None = None,
    name: str | None = None,
    timeout: float | None = None,
    out: Any = None,
    counts: Sequence[int] | None = None,
    ragged: bool = False,
    async_op: bool = False,
) -> Any:
    """Join the tensors of all ranks along the first axis, in the order of the ranks; every rank gets the result.

    Collective.

    Args:
        x: As for `allreduce`. A number or a tensor without axes counts as a tensor of one element.
        group: As for `allreduce`.
        name: As for `allreduce`.
        timeout: As for `allreduce`.
        out: As for `allreduce`.
        counts: The extents of the first axis of every rank's tensor, if they differ; the same on all ranks. One tensor.
        ragged: The extents differ, and the ranks exchange them first (not in a compiled graph).
        async_op: As for `allreduce`.

    Returns:
        `out` or new tensors, of which the first axis has the sum of the extents; with `async_op` a `Work` of it.
    """
    rows = _extents(x, counts, ragged, group, name, timeout)
    return _run(
        _ALL_GATHER,
        x,
        out,
        async_op,
        (*place(group, 5, x, async_op), rows, call_name(name), seconds(timeout)),
        joins=True,
    )


@overload
def gather(
    x: Arrays, root: int = ..., *, group: Group | None = ..., async_op: Literal[False] = ..., **options: Unpack[Ragged]
) -> Arrays | None: ...


@overload
def gather(
    x: Arrays, root: int = ..., *, group: Group | None = ..., async_op: Literal[True], **options: Unpack[Ragged]
) -> Work[Arrays | None]: ...


@overload
def gather(
    x: Arrays, root: int = ..., *, group: Group | None = ..., async_op: bool = ..., **options: Unpack[Ragged]
) -> Arrays | None | Work[Arrays | None]: ...


@overload
def gather(
    x: complex, root: int = ..., *, group: Group | None = ..., async_op: Literal[False] = ..., **options: Unpack[Ragged]
) -> torch.Tensor | None: ...


@overload
def gather(
    x: complex, root: int = ..., *, group: Group | None = ..., async_op: Literal[True], **options: Unpack[Ragged]
) -> Work[torch.Tensor | None]: ...


@overload
def gather(
    x: complex, root: int = ..., *, group: Group | None = ..., async_op: bool = ..., **options: Unpack[Ragged]
) -> torch.Tensor | None | Work[torch.Tensor | None]: ...


def gather(
    x: Any,
    root: int = 0,
    *,
    group: Group | None = None,
    name: str | None = None,
    timeout: float | None = None,
    out: Any = None,
    counts: Sequence[int] | None = None,
    ragged: bool = False,
    async_op: bool = False,
) -> Any:
    """As `all_gather`, but only rank `root` of the group gets the result; the others as in `reduce`. Collective."""
    rows = _extents(x, counts, ragged, group, name, timeout)
    arguments = (*place(group, 6, x, async_op), checked_rank(root), rows, call_name(name), seconds(timeout))
    return _run(_GATHER, x, out, async_op, arguments, root, joins=True)


@overload
def scatter(
    x: Any,
    root: int = ...,
    *,
    out: Arrays,
    group: Group | None = ...,
    async_op: Literal[False] = ...,
    **options: Unpack[Scattered],
) -> Arrays: ...


@overload
def scatter(
    x: Any,
    root: int = ...,
    *,
    out: Arrays,
    group: Group | None = ...,
    async_op: Literal[True],
    **options: Unpack[Scattered],
) -> Work[Arrays]: ...


@overload
def scatter(
    x: Any,
    root: int = ...,
    *,
    out: Arrays,
    group: Group | None = ...,
    async_op: bool = ...,
    **options: Unpack[Scattered],
) -> Arrays | Work[Arrays]: ...


@overload
def scatter(
    x: Arrays,
    root: int = ...,
    *,
    out: None = ...,
    group: Group | None = ...,
    async_op: Literal[False] = ...,
    **options: Unpack[Scattered],
) -> Arrays: ...


@overload
def scatter(
    x: Arrays,
    root: int = ...,
    *,
    out: None = ...,
    group: Group | None = ...,
    async_op: Literal[True],
    **options: Unpack[Scattered],
) -> Work[Arrays]: ...


@overload
def scatter(
    x: Arrays,
    root: int = ...,
    *,
    out: None = ...,
    group: Group | None = ...,
    async_op: bool = ...,
    **options: Unpack[Scattered],
) -> Arrays | Work[Arrays]: ...


def scatter(
    x: Any,
    root: int = 0,
    *,
    out: Any = None,
    group: Group | None = None,
    name: str | None = None,
    timeout: float | None = None,
    counts: Sequence[int] | None = None,
    async_op: bool = False,
) -> Any:
    """Cut the tensors of rank `root` along the first axis into a block for each rank. Collective.

    Args:
        x: On the root as for `allreduce`. With `out` the other ranks pass None; without it, tensors of the root's
            shapes and types, of which the values are not used (`torch.empty(1).expand(shape)` needs no memory). If the
            root's require gradients, those of all ranks must.
        root: The rank of the group that has the tensors.
        out: The tensors for this rank's blocks.
        group: As for `allreduce`.
        name: As for `allreduce`.
        timeout: As for `allreduce`.
        counts: The extents of the blocks' first axes, if they differ; the same on all ranks. One tensor.
        async_op: As for `allreduce`.

    Returns:
        `out`, or new tensors; with `async_op` a `Work` of it.
    """
    arguments = (
        *place(group, 7, x, async_op),
        checked_rank(root),
        listed_counts(counts),
        call_name(name),
        seconds(timeout),
    )
    if x is None and out is None:
        raise ArgumentError("out is None; scatter needs it, or tensors of the root's shapes on all ranks")
    return _run(_SCATTER, x, out, async_op, arguments)


@overload
def reduce_scatter(
    x: Arrays,
    op: Operator = ...,
    *,
    group: Group | None = ...,
    async_op: Literal[False] = ...,
    **options: Unpack[ScaledBlocks],
) -> Arrays: ...


@overload
def reduce_scatter(
    x: Arrays,
    op: Operator = ...,
    *,
    group: Group | None = ...,
    async_op: Literal[True],
    **options: Unpack[ScaledBlocks],
) -> Work[Arrays]: ...


@overload
def reduce_scatter(
    x: Arrays, op: Operator = ..., *, group: Group | None = ..., async_op: bool = ..., **options: Unpack[ScaledBlocks]
) -> Arrays | Work[Arrays]: ...


def reduce_scatter(
    x: Any,
    op: Operator = "sum",
    *,
    group: Group | None = None,
    name: str | None = None,
    timeout: float | None = None,
    out: Any = None,
    counts: Sequence[int] | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: bool = False,
) -> Any:
    """Reduce tensors over the ranks and cut the result along the first axis into a block for each rank. Collective.

    Args:
        x: As for `allreduce`, without numbers. The first axis is a multiple of the number of ranks, unless `counts` is
            given.
        op: As for `allreduce`, without `"adasum"`.
        group: As for `allreduce`.
        name: As for `allreduce`.
        timeout: As for `allreduce`.
        out: As for `allreduce`.
        counts: The extents of the blocks' first axes, if they differ; the same on all ranks. One tensor.
        prescale: As for `allreduce`.
        postscale: As for `allreduce`.
        async_op: As for `allreduce`.

    Returns:
        `out` or new tensors with this rank's blocks; with `async_op` a `Work` of it.
    """
    factors = (checked_float("prescale", prescale), checked_float("postscale", postscale))
    arguments = (
        *place(group, 8, x, async_op),
        operator_name(op),
        *factors,
        listed_counts(counts),
        call_name(name),
        seconds(timeout),
    )
    return _run(_REDUCE_SCATTER, x, out, async_op, arguments)


@overload
def all_to_all(
    x: Arrays, *, group: Group | None = ..., async_op: Literal[False] = ..., **options: Unpack[Exchanged]
) -> Arrays: ...


@overload
def all_to_all(
    x: Arrays, *, group: Group | None = ..., async_op: Literal[True], **options: Unpack[Exchanged]
) -> Work[Arrays]: ...


@overload
def all_to_all(
    x: Arrays, *, group: Group | None = ..., async_op: bool = ..., **options: Unpack[Exchanged]
) -> Arrays | Work[Arrays]: ...


def all_to_all(
    x: Any,
    *,
    group: Group | None = None,
    name: str | None = None,
    timeout: float | None = None,
    out: Any = None,
    send_counts: Sequence[int] | None = None,
    receive_counts: Sequence[int] | None = None,
    async_op: bool = False,
) -> Any:
    """Send block r of every tensor, along the first axis, to rank r; the result has a block from each rank. Collective.

    Args:
        x: As for `allreduce`, without numbers. The first axis is a multiple of the number of ranks, unless
            `send_counts` is given.
        group: As for `allreduce`.
        name: As for `allreduce`.
        timeout: As for `allreduce`.
        out: As for `allreduce`.
        send_counts: The extents of the first axes of the blocks that this rank sends, if they differ. One tensor.
        receive_counts: The same of those that it receives; None with `send_counts`: the ranks exchange them first (not
            in a compiled graph). All ranks give it, or none does.
        async_op: As for `allreduce`.

    Returns:
        `out` or new tensors; with `async_op` a `Work` of it.
    """
    sent, received = listed_counts(send_counts), listed_counts(receive_counts)
    if send_counts is not None and receive_counts is None:
        exchanged = all_to_all(torch.tensor(sent), group=group, name=f"{name or 'all_to_all'}: counts", timeout=timeout)
        received = exchanged.tolist()
    arguments = (*place(group, 9, x, async_op), sent, received, call_name(name), seconds(timeout))
    return _run(_ALL_TO_ALL, x, out, async_op, arguments)


def broadcast_new(tensors: list[torch.Tensor], root: int, group: Group | None, timeout: float | None) -> Any:
    """Return rank `root`'s tensors as new tensors; differentiable."""
    views, name = carried(tensors)
    arguments = (*place(group, 2, tensors), checked_rank(root), name, seconds(timeout))
    results = _ops.call(_BROADCAST.new, views, *arguments)
    return [result.view(tensor.dtype) if name else result for result, tensor in zip(results, tensors, strict=True)]


def broadcast_into(
    tensors: list[torch.Tensor], root: int, group: Group | None, timeout: float | None, async_op: bool, result: Any
) -> Any:
    """Copy rank `root`'s contiguous tensors to all ranks of the group, in place; return `result`, or a `Work` of it."""
    tensors, name = carried(tensors)
    arguments = (*place(group, 2, tensors), checked_rank(root), name, seconds(timeout))
    if async_op:
        number = _ops.call(_BROADCAST.start, tensors, tensors, *arguments)[1]
        torch.autograd.graph.increment_version(tensors)
        return Work(number, lambda _: result)
    _ops.call(_BROADCAST.out, tensors, tensors, *arguments)
    torch.autograd.graph.increment_version(tensors)
    return result


def sum_at(where: tuple[int, int, int], x: torch.Tensor, name: str) -> torch.Tensor:
    """Sum a tensor in place over the ranks of a group, as `place` returned it. Not differentiable."""
    _ops.call(_ALLREDUCE.out, [x], [x], *where, "sum", 1.0, 1.0, name, -1.0)
    torch.autograd.graph.increment_version(x)
    return x


def _run(
    ops: _Collective,
    x: Any,
    out: Any,
    async_op: bool,
    arguments: tuple[Any, ...],
    root: int | None = None,
    joins: bool = False,
) -> Any:
    """Run or start a call. With `root`, only that rank has a result. `joins`: a number gives a tensor.

    `x`: None on the ranks of a scatter that have no tensors.
    """
    checked_flag("async_op", async_op)
    tensors, wrap = ([], list) if x is None and ops is _SCATTER else tensors_of(x)
    if joins and wrap is item:
        wrap = first
    if root is not None and arguments[1] != root:
        out = None
        if not _ops.learns(tensors):
            wrap = nothing
    kinds = ""
    if ops in _MOVING:
        # The core compares neither the types nor their values, so the types are part of the name.
        types, of_types = [tensor.dtype for tensor in tensors], wrap
        tensors, kinds = carried(tensors)
        if kinds:
            arguments = (*arguments[:-2], arguments[-2] + kinds, arguments[-1])
            wrap = lambda results: of_types([each.view(kind) for each, kind in zip(results, types, strict=True)])  # noqa: E731
    if out is None and not async_op:
        op = ops.new if _ops.differentiates(tensors) else ops.no_grad
        return wrap(_ops.call(op, tensors, *arguments))
    given = [] if out is None else tensors if out is x else tensors_of(out, "out")[0]
    refuse_gradients(tensors, "a call with out or async_op")
    if kinds:
        given = tensors if out is x else carried(given)[0]
    if given is not tensors:
        refuse_gradients(given, "a call with out")
    if async_op:
        results, number = _ops.call(ops.start, tensors, given, *arguments)
        if out is not None:
            torch.autograd.graph.increment_version(given)
            return Work(number, lambda _: out)
        return Work(number, lambda _: wrap(results))
    _ops.call(ops.out, tensors, given, *arguments)
    torch.autograd.graph.increment_version(given)
    return out


def _extents(
    x: Any,
    counts: Sequence[int] | None,
    ragged: bool,
    group: Group | None,
    name: str | None,
    timeout: float | None,
) -> list[int]:
    """Return the extents of all ranks' tensors, if they differ."""
    if not checked_flag("ragged", ragged) or counts is not None:
        return listed_counts(counts)
    tensors, _ = tensors_of(x)
    if len(tensors) != 1:
        raise ArgumentError(f"blocks of different lengths need one tensor, not {len(tensors)}")
    extent = tensors[0].shape[0] if tensors[0].dim() else 1
    label = f"{name or 'gather'}: extents"
    found: list[int] = all_gather(torch.tensor([extent]), group=group, name=label, timeout=timeout).tolist()
    return found
