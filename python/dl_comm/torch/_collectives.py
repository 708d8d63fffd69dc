"""Collectives on torch tensors and numbers, on all ranks or on a group.

They are those of the table of collectives. Without `out` and `async_op` they are differentiable, and `torch.compile`
takes them.

Thread rule: any thread may call every function; they wait without the GIL. The ranks of the group must all call them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from dl_comm._arrays import groups
from dl_comm._arrays.groups import Group
from dl_comm._base.checks import checked_flag, checked_float, seconds
from dl_comm._base.errors import ArgumentError
from dl_comm._base.made import Variant, made
from dl_comm._base.table import AllGather, Allreduce, AllToAll, Broadcast, Call, Gather, Reduce, ReduceScatter, Scatter
from dl_comm._job import state
from dl_comm.torch import _autograd as _autograd
from dl_comm.torch import _ops
from dl_comm.torch._arguments import (
    call_name,
    carried,
    checked_rank,
    device_of,
    first,
    item,
    listed_counts,
    matching,
    nothing,
    operator_name,
    place,
    refuse_gradients,
    tensors_of,
)
from dl_comm.torch._levels import allreduce_by_levels, steps_of
from dl_comm.torch._ragged import run_unknown
from dl_comm.torch._work import Work


class _Ops(NamedTuple):
    """The ops of a collective; see torch_ops/collectives.cc."""

    new: Callable[..., Any]
    no_grad: Callable[..., Any]
    out: Callable[..., Any]
    start: Callable[..., Any]


_OPS: dict[type[Call], _Ops] = {
    kind: _Ops(*(getattr(_ops.ops, kind.name + suffix).default for suffix in ("", "_no_grad", "_out", "_start")))
    for kind in (Allreduce, Broadcast, Reduce, AllGather, Gather, Scatter, ReduceScatter, AllToAll)
}
_ALLREDUCE, _BROADCAST = _OPS[Allreduce], _OPS[Broadcast]
_MOVING = (AllGather, Gather, Scatter, AllToAll)

_NOTE = "Differentiable without ``out`` and ``async_op``; backward is collective, too. ``torch.compile`` takes it."
_TORCH = Variant(note=_NOTE, library="torch")
_ON_ROOT = (
    " If ``x`` requires gradients, an empty tensor, which carries the graph: add its sum to the loss, because backward "
    "is collective, too."
)
_REDUCE = _TORCH._replace(returns=Reduce.returns + _ON_ROOT)
_GATHER = _TORCH._replace(returns=Gather.returns + _ON_ROOT)


@made(Allreduce, _TORCH)
def allreduce(x: Any, op: str, prescale: float, postscale: float, common: tuple[Any, ...]) -> Any:
    group, name, timeout, out, async_op, by_name = common
    world = state.current.world if group is None and not groups.is_routed() else None
    is_plain = (
        type(x) is torch.Tensor and (out is None or out is x) and name is None and timeout is None and not by_name
    )
    is_plain = is_plain and type(prescale) is float is type(postscale) and async_op is False
    if world is not None and is_plain and not _ops.differentiates(given := [x]):
        # The general way takes a microsecond more.
        short = (0, world.rank, world.size, operator_name(op), prescale, postscale, "", -1.0)
        if out is None:
            return _ops.call(_ALLREDUCE.no_grad, given, *short)[0]
        _ops.call(_ALLREDUCE.out, given, given, *short)
        torch.autograd.graph.increment_version(x)
        return x
    factors = (checked_float("prescale", prescale), checked_float("postscale", postscale))
    if group is None and groups.is_routed() and async_op is False and not by_name:
        tensors, wrap = tensors_of(x)
        steps = steps_of(tensors, operator_name(op), *factors)
        if steps is not None:
            results = allreduce_by_levels(steps, tensors, out, op, call_name(name), seconds(timeout))
            return wrap(results) if out is None else results
    return _run(Allreduce, x, common, operator_name(op), *factors)


@made(Reduce, _REDUCE)
def reduce(x: Any, root: int, op: str, common: tuple[Any, ...]) -> Any:
    return _run(Reduce, x, common, operator_name(op), 1.0, 1.0, checked_rank(root), root=root)


@made(AllGather, _TORCH)
def all_gather(x: Any, counts: Sequence[Any] | None, ragged: bool, return_counts: bool, common: tuple[Any, ...]) -> Any:
    if checked_flag("ragged", ragged) and counts is None and _travel_inside(x, common):
        return run_unknown(AllGather, x, None, return_counts, common)
    extents = _extents(AllGather, x, counts, ragged, common)
    result = _run(AllGather, x, common, extents)
    if not checked_flag("return_counts", return_counts):
        return result
    return _with_counts(x, result, extents, common, lambda tensor, size: tensor.shape[0] if tensor.dim() else 1)


@made(Gather, _GATHER)
def gather(x: Any, root: int, counts: Sequence[Any] | None, ragged: bool, common: tuple[Any, ...]) -> Any:
    if checked_flag("ragged", ragged) and counts is None and _travel_inside(x, common):
        return run_unknown(Gather, x, None, False, common, checked_rank(root))
    return _run(Gather, x, common, checked_rank(root), _extents(Gather, x, counts, ragged, common), root=root)


@made(Scatter, _TORCH._replace(note=_NOTE + " If the root's tensors require gradients, those of all ranks must."))
def scatter(x: Any, root: int, counts: Sequence[Any] | None, common: tuple[Any, ...]) -> Any:
    if x is None and common[3] is None:
        raise ArgumentError("out is None; scatter needs it, or tensors of the root's shapes on all ranks")
    return _run(Scatter, x, common, checked_rank(root), listed_counts(counts, common[3] if x is None else x))


@made(ReduceScatter, _TORCH)
def reduce_scatter(
    x: Any, op: str, counts: Sequence[Any] | None, prescale: float, postscale: float, common: tuple[Any, ...]
) -> Any:
    factors = (checked_float("prescale", prescale), checked_float("postscale", postscale))
    return _run(ReduceScatter, x, common, operator_name(op), *factors, listed_counts(counts, x))


@made(AllToAll, _TORCH)
def all_to_all(
    x: Any,
    send_counts: Sequence[Any] | None,
    receive_counts: Sequence[Any] | None,
    return_counts: bool,
    common: tuple[Any, ...],
) -> Any:
    if send_counts is not None and receive_counts is None and _travel_inside(x, common):
        return run_unknown(AllToAll, x, send_counts, return_counts, common)
    sent, received = listed_counts(send_counts, x), listed_counts(receive_counts, x)
    if send_counts is not None and receive_counts is None:
        received = _before(AllToAll, all_to_all, _parts(sent, x), common)
    result = _run(AllToAll, x, common, sent, received)
    if not checked_flag("return_counts", return_counts):
        return result
    return _with_counts(x, result, received, common, lambda tensor, size: tensor.shape[0] // size)


def _travel_inside(x: Any, common: tuple[Any, ...]) -> bool:
    """Return whether lengths travel inside the call. Otherwise the ranks exchange them first.

    They do in host memory, where started calls on GPUs go, too; not in a compiled graph.
    """
    return not torch.compiler.is_compiling() and not (common[4] is False and device_of(x) == "gpu")


def _parts(counts: list[int], x: Any) -> list[list[int]]:
    """Return the counts of each of the tensors `x`."""
    size = len(counts) // (len(x) if isinstance(x, (list, tuple)) else 1)
    return [counts[start : start + size] for start in range(0, len(counts), size)]


def _with_counts(
    x: Any, result: Any, counts: list[int], common: tuple[Any, ...], even: Callable[[torch.Tensor, int], int]
) -> Any:
    """Return a result, or a `Work` of it, with the extents of its blocks: `counts`, or `even` ones."""
    tensors, wrap = tensors_of(x)
    size = place(common[0])[2]
    each = _parts(counts, x) if counts else [[even(tensor, size)] * size for tensor in tensors]
    counted: Any = each[0] if wrap in (first, item) else each
    if not isinstance(result, Work):
        return result, counted
    return result.map(lambda made: (made, counted))


def broadcast_new(
    tensors: list[torch.Tensor],
    root: int,
    group: Group | None,
    name: str = "",
    timeout: float = -1.0,
    by_name: bool = False,
) -> Any:
    """Return rank `root`'s tensors as new tensors; differentiable."""
    views, kinds = carried(tensors)
    arguments = (*place(group, Broadcast.code, tensors), checked_rank(root), name + kinds, timeout, by_name)
    results = _ops.call(_BROADCAST.new, views, *arguments)
    return [result.view(tensor.dtype) if kinds else result for result, tensor in zip(results, tensors, strict=True)]


def broadcast_into(
    tensors: list[torch.Tensor],
    root: int,
    group: Group | None,
    name: str = "",
    timeout: float = -1.0,
    by_name: bool = False,
    async_op: bool = False,
    result: Callable[[], Any] = lambda: None,
) -> Any:
    """Copy rank `root`'s contiguous tensors to all ranks of the group, in place; return `result`, or a `Work` of it."""
    tensors, kinds = carried(tensors)
    arguments = (*place(group, Broadcast.code, tensors), checked_rank(root), name + kinds, timeout, by_name)
    if async_op:
        number = _ops.call(_BROADCAST.start, tensors, tensors, *arguments)[1]
        torch.autograd.graph.increment_version(tensors)
        return Work(number, lambda _: result())
    _ops.call(_BROADCAST.out, tensors, tensors, *arguments)
    torch.autograd.graph.increment_version(tensors)
    return result()


def sum_at(where: tuple[int, int, int], x: torch.Tensor, name: str) -> torch.Tensor:
    """Sum a tensor in place over the ranks of a group, as `place` returned it. Not differentiable."""
    _ops.call(_ALLREDUCE.out, [x], [x], *where, "sum", 1.0, 1.0, name, -1.0)
    torch.autograd.graph.increment_version(x)
    return x


def _run(kind: type[Call], x: Any, common: tuple[Any, ...], *own: Any, root: int | None = None) -> Any:
    """Run or start a call. `own`: its own arguments, as the op takes them. With `root`, only that rank has a result.

    `x`: None on the ranks of a scatter that have no tensors.
    """
    group, _, _, out, async_op, _ = common
    ops = _OPS[kind]
    arguments: tuple[Any, ...] = (*place(group, kind.code, x, async_op), *own, *matching(common))
    checked_flag("async_op", async_op)
    tensors, wrap = ([], list) if x is None and kind is Scatter else tensors_of(x)
    if kind in (AllGather, Gather) and wrap is item:
        wrap = first
    if root is not None and arguments[1] != root:
        out = None
        if not _ops.learns(tensors):
            wrap = nothing
    kinds = ""
    if kind in _MOVING:
        # The core compares neither the types nor their values, so the types are part of the name.
        types, of_types = [tensor.dtype for tensor in tensors], wrap
        tensors, kinds = carried(tensors)
        if kinds:
            arguments = (*arguments[:-3], arguments[-3] + kinds, *arguments[-2:])
            wrap = lambda results: of_types([each.view(dtype) for each, dtype in zip(results, types, strict=True)])  # noqa: E731
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
    kind: type[Call], x: Any, counts: Sequence[Any] | None, ragged: bool, common: tuple[Any, ...]
) -> list[int]:
    """Return the extents of all ranks' tensors, if they differ, as the ops take them."""
    if not checked_flag("ragged", ragged) or counts is not None:
        return listed_counts(counts, x)
    tensors, _ = tensors_of(x)
    return _before(kind, all_gather, [[tensor.shape[0] if tensor.dim() else 1] for tensor in tensors], common)


def _before(kind: type[Call], call: Callable[..., Any], extents: list[list[int]], common: tuple[Any, ...]) -> list[int]:
    """Return the extents of all ranks for each tensor, exchanged by a call before that of `kind`."""
    group, name, timeout, _, _, by_name = common
    options = {"group": group, "timeout": timeout, "by_name": by_name}
    found = call([torch.tensor(each) for each in extents], name=f"{call_name(name) or kind.name}: extents", **options)
    listed: list[int] = torch.cat(found).tolist()
    return listed
