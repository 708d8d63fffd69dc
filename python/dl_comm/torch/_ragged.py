"""Calls in which the lengths travel: all-gathers, gathers, all-to-alls of tensors as NumPy arrays, in host memory.

Thread rule: any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dl_comm._arrays import collectives
from dl_comm._arrays.work import Work
from dl_comm._base.checks import checked_flag, for_each, seconds
from dl_comm._base.errors import ArgumentError
from dl_comm._base.table import AllGather, AllToAll, Call, Gather
from dl_comm.torch import _ops
from dl_comm.torch._arguments import call_name, carried, first, item, nothing, place, refuse_gradients, tensors_of
from dl_comm.torch._autograd import gradient_of

_RUN: dict[type[Call], Callable[..., Any]] = {
    AllGather: collectives.all_gather,
    Gather: collectives.gather_unknown,
    AllToAll: collectives.all_to_all,
}


def run_unknown(
    kind: type[Call], x: Any, sent: Any, return_counts: bool, common: tuple[Any, ...], root: int | None = None
) -> Any:
    """Run or start a call of which this rank knows only the extents that it sends. Only `root` has a result, if any."""
    group, name, timeout, out, async_op, by_name = common
    tensors, wrap = tensors_of(x)
    wrap = first if wrap is item else wrap
    with_counts = checked_flag("return_counts", return_counts)
    where = place(group, kind.code, tensors)
    if root not in (None, where[1]):
        out, wrap = None, wrap if _ops.learns(tensors) else nothing
    if out is not None or async_op:
        refuse_gradients(tensors, "a call with out or async_op")
    arrays, kinds = _as_arrays(tensors)
    own: dict[str, Any] = {"ragged": True} if root is None else {"root": root}
    if sent is not None:
        own = {"send_counts": _plain(sent)}
    options = {"group": group, "timeout": timeout, "by_name": by_name, "async_op": async_op, "return_counts": True}
    options["name"] = f"{call_name(name) or kind.name}{kinds}" if kinds else name

    def as_tensors(found: Any) -> tuple[list[torch.Tensor], list[list[int]]]:
        results, counts = found
        if results is None:
            return [x.new_empty((0,)) for x in tensors], counts
        made = [torch.from_numpy(y).view(x.dtype).to(x.device) for x, y in zip(tensors, results, strict=True)]
        return made, counts

    def returned(results: Sequence[torch.Tensor], counts: list[list[int]]) -> Any:
        found = wrap(list(results)) if out is None else _into(out, results)
        return (found, counts if wrap is not first else counts[0]) if with_counts else found

    def run() -> tuple[list[torch.Tensor], list[list[int]]]:
        return as_tensors(_RUN[kind](arrays, **own, **options))

    if async_op:
        work: Work[Any] = _RUN[kind](arrays, **own, **options)
        return work.map(lambda found: returned(*as_tensors(found)))
    if not _ops.learns(tensors):
        return returned(*run())
    known: list[list[int]] = []
    how = (f"{name or kind.name}.gradient", seconds(timeout), bool(by_name))

    def gradient(grads: Sequence[Any]) -> list[Any]:
        kept = [i for i, x in enumerate(tensors) if x.is_floating_point() or x.is_complex()]
        arguments: list[Any] = [] if root is None else [root]
        if sent is not None:
            lists = for_each("counts", own["send_counts"], len(tensors))
            arguments.append([int(extent) for i in kept for extent in lists[i]])
        arguments.append([extent for i in kept for extent in known[i]])
        shapes = [tensors[i].shape for i in kept]
        made = iter(gradient_of(kind.name, [grads[i] for i in kept], shapes, where, arguments, how))
        return [next(made) if i in kept else None for i in range(len(tensors))]

    results = _Function.apply(run, gradient, known, *tensors)
    return returned(results, known)


class _Function(torch.autograd.Function):
    """The call; `run` returns new tensors and counts, which go to `known`."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., Any], gradient: Callable[..., Any], known: list[Any], *tensors: torch.Tensor
    ) -> Any:
        results, counts = run()
        known.extend(counts)
        ctx.gradient = gradient
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, None, *ctx.gradient(grads)


def _as_arrays(tensors: list[torch.Tensor]) -> tuple[list[Any], str]:
    """Return NumPy arrays and, for the call's name, the types that NumPy does not know. GPU memory is copied."""
    views, kinds = carried([x.detach().cpu().resolve_conj().resolve_neg() for x in tensors])
    if any(x.dtype is torch.bfloat16 for x in views):
        kinds += " of bfloat16"
        views = [x.view(torch.int16) if x.dtype is torch.bfloat16 else x for x in views]
    return [x.contiguous().numpy() for x in views], kinds


def _plain(sent: Any) -> Any:
    """Return extents without tensors."""
    if isinstance(sent, (list, tuple)):
        return [_plain(each) for each in sent]
    return sent.tolist() if isinstance(sent, torch.Tensor) else sent


def _into(out: Any, results: Sequence[torch.Tensor]) -> Any:
    """Copy results into the tensors of `out`; return it."""
    given, _ = tensors_of(out, "out")
    refuse_gradients(given, "a call with out")
    wanted = [(tuple(y.shape), y.dtype) for y in results]
    if [(tuple(y.shape), y.dtype) for y in given] != wanted:
        raise ArgumentError(f"out: the results have the shapes and types {wanted}")
    for target, y in zip(given, results, strict=True):
        target.copy_(y)
    return out
