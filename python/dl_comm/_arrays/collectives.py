"""Collectives on NumPy arrays, arrays in GPU memory and numbers, on all ranks or on a group.

Tensors of a framework go to its binding.

Thread rule: any thread may call every function. The ranks of the group must all call the collective ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from dl_comm import _dl_comm
from dl_comm._arrays.arguments import (
    NO_FACTORS,
    arrays_of,
    block_extent,
    checked_counts,
    checked_rank,
    in_elements,
    kind_of,
    nothing,
    one_array,
    operator_code,
    results_like,
    returned,
)
from dl_comm._arrays.cuda_arrays import any_on_gpu, in_core, with_axis
from dl_comm._arrays.groups import Group, is_of_all
from dl_comm._arrays.groups import given as members
from dl_comm._arrays.memory import new_result_like
from dl_comm._arrays.work import Work, limit
from dl_comm._base.checks import checked_by_name, checked_flag, checked_name, seconds
from dl_comm._base.errors import ArgumentError
from dl_comm._base.made import made
from dl_comm._base.table import (
    OPERATORS,
    AllGather,
    Allreduce,
    AllToAll,
    Barrier,
    Broadcast,
    Call,
    Gather,
    Reduce,
    ReduceScatter,
    Scatter,
)

_ALLREDUCE = Allreduce.code


class _Call:
    """What all collectives have in common."""

    def __init__(
        self,
        kind: type[Call],
        group: Group | None = None,
        name: str | None = None,
        timeout: float | None = None,
        out: Any = None,
        async_op: bool = False,
        by_name: bool = False,
    ) -> None:
        checked_name(name)
        self.kind, self.name, self.out, self.by_name = kind, name, out, checked_by_name(by_name, name)
        self.timeout, self.async_op = limit(timeout), checked_flag("async_op", async_op)
        self.group = members(group, kind.code, async_op=self.async_op)

    def run(
        self,
        result: Callable[[], Any],
        sources: list[Any] | None,
        destinations: list[Any] | None,
        *,
        operator: int = 0,
        root: int = 0,
        blocks: int = 1,
        counts: tuple[Sequence[int] | None, Sequence[int] | None] = (None, None),
        factors: tuple[float, float] = NO_FACTORS,
    ) -> Any:
        """Runs or starts the call; ``result`` makes the caller's result once it has ended."""
        what = (self.kind.code, operator, root, blocks, *in_core(sources, destinations))
        spec = (*what, *counts, self.name, self.timeout, factors, self.by_name)
        handle = self.group.handle
        if self.async_op:
            return Work(handle.start(spec), lambda _: result())
        handle.run(spec)
        return result()

    def run_unknown(self, x: Any, arrays: list[Any], sent: list[list[int]] | None, return_counts: bool) -> Any:
        """Runs or starts a call of which this rank knows only the extents that it sends: of each array, a list."""
        wrap, with_counts = kind_of(x), checked_flag("return_counts", return_counts)
        # Rows without elements have lengths as rows of bytes.
        each = [int(np.prod(array.shape[1:], dtype=np.int64)) for array in arrays]
        given = [array if row else np.zeros(len(array), np.uint8) for array, row in zip(arrays, each, strict=True)]
        lengths = None
        if sent is not None:
            lengths = [extent * (row or 1) for extents, row in zip(sent, each, strict=True) for extent in extents]
        what = (self.kind.code, 0, 0, 1, given, None, lengths, None)
        spec = (*what, self.name, self.timeout, NO_FACTORS, self.by_name)

        def result(received: Any) -> Any:
            counts = [
                [length // (row or 1) for length in lengths] for (lengths, _), row in zip(received, each, strict=True)
            ]
            found = []
            for array, row, extents, (_, memory) in zip(arrays, each, counts, received, strict=True):
                elements = np.asarray(memory).view(array.dtype) if row else np.empty(0, array.dtype)
                found.append(elements.reshape(sum(extents), *array.shape[1:]))
            results = wrap(found) if self.out is None else self.out
            if self.out is not None:
                for place, array in zip(results_like(self.out, found, [a.shape for a in found]), found, strict=True):
                    np.copyto(place, array)
            return (results, counts if wrap is list else counts[0]) if with_counts else results

        handle = self.group.handle
        if self.async_op:
            return Work(handle.start_unknown(spec), lambda work: result(work.received()))
        return result(handle.run_unknown(spec))

    def before(self, kind: type[Call], extents: Sequence[int], what: str) -> list[int]:
        """The extents of all ranks, exchanged by a call before this one."""
        values = np.array(extents)
        shape = values.shape if kind is AllToAll else (len(values) * self.group.size,)
        call = _Call(kind, self.group, f"{self.name or self.kind.name}: {what}")
        call.timeout, call.by_name = self.timeout, self.by_name
        found = np.empty(shape, values.dtype)
        blocks = self.group.size if kind is AllToAll else 1
        call.run(nothing, [values], [found], blocks=blocks)
        extents_of_all: list[int] = found.tolist()
        return extents_of_all


@made(Allreduce)
def allreduce(x: Any, op: str, prescale: float, postscale: float, common: tuple[Any, ...]) -> Any:
    group, name, timeout, out, async_op, by_name = common
    is_plain = type(x) is np.ndarray and (out is x or out is None) and by_name is False
    is_short = type(prescale) is float is type(postscale) and type(op) is str and (name is None or type(name) is str)
    if is_plain and is_short and type(async_op) is bool and prescale == 1.0 == postscale and op in OPERATORS:
        # Such an array needs no checks here, and a short call no more than this.
        result = new_result_like(x) if out is None else x
        wait = 0.0 if timeout is None else limit(timeout)
        spec = (_ALLREDUCE, OPERATORS[op], 0, 1, [x], [result], None, None, name, wait, NO_FACTORS, False)
        handle = members(group, _ALLREDUCE, async_op=async_op).handle
        if async_op:
            return Work(handle.start(spec), lambda _: result)
        handle.run(spec)
        return result
    call = _Call(Allreduce, *common)
    arrays, wrap = arrays_of(x)
    results = results_like(out, arrays, [array.shape for array in arrays])
    operator, factors = operator_code(op, prescale, postscale)
    return call.run(returned(out, results, wrap), arrays, results, operator=operator, factors=factors)


@made(Reduce)
def reduce(x: Any, root: int, op: str, common: tuple[Any, ...]) -> Any:
    call = _Call(Reduce, *common)
    root = checked_rank(root, call.group)
    arrays, wrap = arrays_of(x)
    operator, _ = operator_code(op, *NO_FACTORS)
    if call.group.rank != root:
        return call.run(nothing, arrays, None, operator=operator, root=root)
    results = results_like(call.out, arrays, [array.shape for array in arrays])
    return call.run(returned(call.out, results, wrap), arrays, results, operator=operator, root=root)


@made(AllGather)
def all_gather(x: Any, counts: Sequence[int] | None, ragged: bool, return_counts: bool, common: tuple[Any, ...]) -> Any:
    call = _Call(AllGather, *common)
    if checked_flag("ragged", ragged) and counts is None:
        arrays = [with_axis(array) for array in arrays_of(x)[0]]
        if not any_on_gpu(arrays):
            return call.run_unknown(x, arrays, None, return_counts)
    return _gathered(call, x, None, counts, ragged, return_counts)


@made(Gather)
def gather(x: Any, root: int, counts: Sequence[int] | None, ragged: bool, common: tuple[Any, ...]) -> Any:
    call = _Call(Gather, *common)
    return _gathered(call, x, checked_rank(root, call.group), counts, ragged)


def _gathered(
    call: _Call, x: Any, root: int | None, counts: Sequence[int] | None, ragged: bool, return_counts: bool = False
) -> Any:
    """Joins arrays on rank ``root``; None: on all ranks."""
    arrays = [with_axis(array) for array in arrays_of(x)[0]]
    rows = _rows(call, arrays, counts, ragged)
    counted = (in_elements(rows, arrays[0]), None)
    if root is not None and call.group.rank != root:
        return call.run(nothing, arrays, None, root=root, counts=counted)
    totals = [sum(rows) if rows is not None else call.group.size * len(array) for array in arrays]
    shapes = [(total, *array.shape[1:]) for array, total in zip(arrays, totals, strict=True)]
    results = results_like(call.out, arrays, shapes)
    result = returned(call.out, results, kind_of(x))
    if checked_flag("return_counts", return_counts):
        extents = [rows or [len(array)] * call.group.size for array in arrays]
        result = _with_counts(result, kind_of(x)(extents))
    return call.run(result, arrays, results, root=root or 0, counts=counted)


@made(Scatter)
def scatter(x: Any, root: int, counts: Sequence[int] | None, common: tuple[Any, ...]) -> Any:
    call = _Call(Scatter, *common)
    root = checked_rank(root, call.group)
    if call.out is None and x is None:
        raise ArgumentError("out is None; scatter needs it, or arrays of the root's shapes on all ranks")
    sources = arrays_of(x)[0] if call.out is None or call.group.rank == root else []
    if call.out is None:
        rows = None if counts is None else checked_counts(counts, call.group, sources)
        results = results_like(None, sources, _blocks(call, sources, rows))
    else:
        results, _ = arrays_of(call.out, "out")
        rows = _rows(call, results, counts, False)
        if call.group.rank == root:
            _check_blocks(call, sources, results, rows)
    result = returned(call.out, results, kind_of(x))
    given = sources if call.group.rank == root else None
    return call.run(result, given, results, root=root, counts=(in_elements(rows, results[0]), None))


@made(ReduceScatter)
def reduce_scatter(
    x: Any, op: str, counts: Sequence[int] | None, prescale: float, postscale: float, common: tuple[Any, ...]
) -> Any:
    call = _Call(ReduceScatter, *common)
    arrays, _ = arrays_of(x)
    rows = None if counts is None else checked_counts(counts, call.group, arrays)
    results = results_like(call.out, arrays, _blocks(call, arrays, rows))
    operator, factors = operator_code(op, prescale, postscale)
    counted = (in_elements(rows, arrays[0]), None)
    result = returned(call.out, results, kind_of(x))
    return call.run(result, arrays, results, operator=operator, counts=counted, factors=factors)


@made(AllToAll)
def all_to_all(
    x: Any,
    send_counts: Sequence[Any] | None,
    receive_counts: Sequence[int] | None,
    return_counts: bool,
    common: tuple[Any, ...],
) -> Any:
    call = _Call(AllToAll, *common)
    arrays, _ = arrays_of(x)
    if send_counts is not None and receive_counts is None:
        if not any_on_gpu(arrays):
            return call.run_unknown(x, arrays, _sent(send_counts, call.group, arrays), return_counts)
        receive_counts = call.before(AllToAll, checked_counts(send_counts, call.group, arrays), "counts")
    with_counts = checked_flag("return_counts", return_counts)
    if send_counts is None:
        if receive_counts is not None:
            raise ArgumentError("receive_counts without send_counts; give both")
        _blocks(call, arrays, None)
        results = results_like(call.out, arrays, [array.shape for array in arrays])
        result = returned(call.out, results, kind_of(x))
        if with_counts:
            even = [[len(array) // call.group.size] * call.group.size for array in arrays]
            result = _with_counts(result, kind_of(x)(even))
        return call.run(result, arrays, results, blocks=call.group.size)
    sent = checked_counts(send_counts, call.group, arrays)
    received = checked_counts(cast(Sequence[int], receive_counts), call.group, None)
    results = results_like(call.out, arrays, [(sum(received), *arrays[0].shape[1:])])
    counts = (in_elements(sent, arrays[0]), in_elements(received, arrays[0]))
    result = returned(call.out, results, kind_of(x))
    if with_counts:
        result = _with_counts(result, kind_of(x)([received]))
    return call.run(result, arrays, results, counts=counts)


def _sent(send_counts: Sequence[Any], group: Group, arrays: list[Any]) -> list[list[int]]:
    """The extents that this rank sends of each array: ``send_counts`` is a list of them, or those of the only array."""
    is_list = isinstance(send_counts, (list, tuple)) and isinstance(next(iter(send_counts), None), (list, tuple))
    lists = send_counts if is_list else [send_counts]
    if len(lists) != len(arrays):
        raise ArgumentError(
            f"blocks of different lengths need one array, not {len(arrays)}, or a list of send_counts for each"
        )
    return [checked_counts(each, group, [array]) for each, array in zip(lists, arrays, strict=True)]


def _with_counts(result: Callable[[], Any], counts: Any) -> Callable[[], Any]:
    return lambda: (result(), counts)


def broadcast_in(
    arrays: list[Any],
    root: int,
    group: Group | None = None,
    name: str | None = None,
    timeout: float | None = None,
    async_op: bool = False,
    by_name: bool = False,
    result: Callable[[list[Any]], Any] = list,
    into: list[Any] | None = None,
) -> Any:
    """Copies arrays from rank ``root`` of a group, in place or ``into`` others; returns ``result`` of them."""
    call = _Call(Broadcast, group, name, timeout, None, async_op, by_name)
    written = arrays if into is None else into
    return call.run(returned(None, written, result), arrays, written, root=checked_rank(root, call.group))


@made(Barrier)
def barrier(common: tuple[Any, ...]) -> None:
    group, name, timeout = common
    if is_of_all(group):
        checked_name(name)
        _dl_comm.barrier(seconds(timeout))
        return
    _Call(Barrier, *common).run(nothing, [], [])


def _rows(call: _Call, arrays: list[Any], counts: Sequence[int] | None, ragged: bool) -> list[int] | None:
    """The extents of all ranks' arrays, if they differ."""
    if not checked_flag("ragged", ragged) and counts is None:
        return None
    one_array(arrays)
    if counts is None:
        return call.before(AllGather, [len(arrays[0])], "extents")
    listed = checked_counts(counts, call.group, None)
    if listed[call.group.rank] != _extent(arrays[0]):
        raise ArgumentError(
            f"counts has {listed[call.group.rank]} for this rank; its array has the shape {arrays[0].shape}"
        )
    return listed


def _extent(array: Any) -> int:
    """The extent of the first axis. Raises ArgumentError for an array without axes."""
    if not array.ndim:
        raise ArgumentError("an array of the shape () has no first axis to cut into blocks")
    return len(array)


def _blocks(call: _Call, arrays: list[Any], rows: list[int] | None) -> list[tuple[int, ...]]:
    """The shapes of this rank's blocks of the arrays."""
    own = [block_extent(array, index, rows, call.group) for index, array in enumerate(arrays)]
    return [(extent, *array.shape[1:]) for array, extent in zip(arrays, own, strict=True)]


def _check_blocks(call: _Call, sources: list[Any], results: list[Any], rows: list[int] | None) -> None:
    """Raises ArgumentError when the arrays of the root of a scatter do not fit its ``out``."""
    if len(sources) != len(results):
        raise ArgumentError(f"x has {len(sources)} arrays; out has {len(results)}")
    for index, (source, block) in enumerate(zip(sources, results, strict=True)):
        wanted = (sum(rows) if rows is not None else call.group.size * _extent(block), *block.shape[1:])
        if source.shape != wanted:
            raise ArgumentError(f"x: array {index} has the shape {source.shape}; out asks for {wanted}")
