"""Collectives on NumPy arrays, arrays in GPU memory and numbers, on all ranks or on a group.

Tensors of a framework go to its binding.

Thread rule: any thread may call every function. The ranks of the group must all call the collective ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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

    def run_unknown(
        self, x: Any, arrays: list[Any], sent: list[list[int]] | None, return_counts: bool, root: int | None = None
    ) -> Any:
        """Runs or starts a call of which this rank knows only the extents that it sends: of each array, a list.

        With ``root``, only that rank has a result.
        """
        wrap, with_counts = kind_of(x), checked_flag("return_counts", return_counts)
        # Rows without elements have lengths as rows of bytes.
        each = [int(np.prod(array.shape[1:], dtype=np.int64)) for array in arrays]
        given = [array if row else np.zeros(len(array), np.uint8) for array, row in zip(arrays, each, strict=True)]
        what = (self.kind.code, 0, root or 0, 1, given, None, in_elements(sent, given), None)
        spec = (*what, self.name, self.timeout, NO_FACTORS, self.by_name)

        def result(received: Any) -> Any:
            counts = [
                [length // (row or 1) for length in lengths] for (lengths, _), row in zip(received, each, strict=True)
            ]
            results = placed(received, counts) if root in (None, self.group.rank) else None
            return (results, counts if wrap is list else counts[0]) if with_counts else results

        def placed(received: Any, counts: list[list[int]]) -> Any:
            found = []
            for array, row, extents, (_, memory) in zip(arrays, each, counts, received, strict=True):
                elements = np.asarray(memory).view(array.dtype) if row else np.empty(0, array.dtype)
                found.append(elements.reshape(sum(extents), *array.shape[1:]))
            if self.out is None:
                return wrap(found)
            for place, array in zip(results_like(self.out, found, [a.shape for a in found]), found, strict=True):
                np.copyto(place, array)
            return self.out

        handle = self.group.handle
        if self.async_op:
            return Work(handle.start_unknown(spec), lambda work: result(work.received()))
        return result(handle.run_unknown(spec))

    def before(self, kind: type[Call], extents: list[list[int]]) -> list[list[int]]:
        """The extents of all ranks for each array, exchanged by a call before this one."""
        values = np.ascontiguousarray(np.array(extents).T)
        found = np.empty((self.group.size, len(extents)), values.dtype)
        call = _Call(kind, self.group, f"{self.name or self.kind.name}: extents")
        call.timeout, call.by_name = self.timeout, self.by_name
        call.run(nothing, [values], [found], blocks=len(values))
        extents_of_all: list[list[int]] = found.T.tolist()
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
def all_gather(x: Any, counts: Sequence[Any] | None, ragged: bool, return_counts: bool, common: tuple[Any, ...]) -> Any:
    return _gathered(_Call(AllGather, *common), x, None, counts, ragged, return_counts)


@made(Gather)
def gather(x: Any, root: int, counts: Sequence[Any] | None, ragged: bool, common: tuple[Any, ...]) -> Any:
    call = _Call(Gather, *common)
    return _gathered(call, x, checked_rank(root, call.group), counts, ragged)


def _gathered(
    call: _Call, x: Any, root: int | None, counts: Sequence[Any] | None, ragged: bool, return_counts: bool = False
) -> Any:
    """Joins arrays on rank ``root``; None: on all ranks."""
    arrays = [with_axis(array) for array in arrays_of(x)[0]]
    rows = _rows(call, arrays, counts)
    if checked_flag("ragged", ragged) and rows is None:
        if not any_on_gpu(arrays):
            return call.run_unknown(x, arrays, None, return_counts, root)
        rows = call.before(AllGather, [[len(array)] for array in arrays])
    counted = (in_elements(rows, arrays), None)
    if root is not None and call.group.rank != root:
        return call.run(nothing, arrays, None, root=root, counts=counted)
    extents = rows or [[len(array)] * call.group.size for array in arrays]
    shapes = [(sum(each), *array.shape[1:]) for array, each in zip(arrays, extents, strict=True)]
    results = results_like(call.out, arrays, shapes)
    result = returned(call.out, results, kind_of(x))
    if checked_flag("return_counts", return_counts):
        result = _with_counts(result, kind_of(x)(extents))
    return call.run(result, arrays, results, root=root or 0, counts=counted)


def gather_unknown(x: Any, root: int, return_counts: bool, **common: Any) -> Any:
    """A gather of arrays of which the ranks know only their own extents; every rank may ask for those of all."""
    call = _Call(Gather, **common)
    return call.run_unknown(x, [with_axis(array) for array in arrays_of(x)[0]], None, return_counts, root)


@made(Scatter)
def scatter(x: Any, root: int, counts: Sequence[Any] | None, common: tuple[Any, ...]) -> Any:
    call = _Call(Scatter, *common)
    root = checked_rank(root, call.group)
    if call.out is None and x is None:
        raise ArgumentError("out is None; scatter needs it, or arrays of the root's shapes on all ranks")
    sources = arrays_of(x)[0] if call.out is None or call.group.rank == root else []
    if call.out is None:
        rows = None if counts is None else checked_counts(counts, call.group, sources, whole=True)
        results = results_like(None, sources, _blocks(call, sources, rows))
    else:
        results, _ = arrays_of(call.out, "out")
        rows = _rows(call, results, counts)
        if call.group.rank == root:
            _check_blocks(call, sources, results, rows)
    result = returned(call.out, results, kind_of(x))
    given = sources if call.group.rank == root else None
    return call.run(result, given, results, root=root, counts=(in_elements(rows, results), None))


@made(ReduceScatter)
def reduce_scatter(
    x: Any, op: str, counts: Sequence[Any] | None, prescale: float, postscale: float, common: tuple[Any, ...]
) -> Any:
    call = _Call(ReduceScatter, *common)
    arrays, _ = arrays_of(x)
    rows = None if counts is None else checked_counts(counts, call.group, arrays, whole=True)
    results = results_like(call.out, arrays, _blocks(call, arrays, rows))
    operator, factors = operator_code(op, prescale, postscale)
    counted = (in_elements(rows, arrays), None)
    result = returned(call.out, results, kind_of(x))
    return call.run(result, arrays, results, operator=operator, counts=counted, factors=factors)


@made(AllToAll)
def all_to_all(
    x: Any,
    send_counts: Sequence[Any] | None,
    receive_counts: Sequence[Any] | None,
    return_counts: bool,
    common: tuple[Any, ...],
) -> Any:
    call = _Call(AllToAll, *common)
    arrays, _ = arrays_of(x)
    sent = received = None
    if send_counts is not None:
        sent = checked_counts(send_counts, call.group, arrays, whole=True)
        if receive_counts is not None:
            received = checked_counts(receive_counts, call.group, arrays)
        elif any_on_gpu(arrays):
            received = call.before(AllToAll, sent)
        else:
            return call.run_unknown(x, arrays, sent, return_counts)
    elif receive_counts is not None:
        raise ArgumentError("receive_counts without send_counts; give both")
    extents = received or [[block[0]] * call.group.size for block in _blocks(call, arrays, None)]
    shapes = [(sum(each), *array.shape[1:]) for array, each in zip(arrays, extents, strict=True)]
    results = results_like(call.out, arrays, shapes)
    result = returned(call.out, results, kind_of(x))
    if checked_flag("return_counts", return_counts):
        result = _with_counts(result, kind_of(x)(extents))
    counts = (in_elements(sent, arrays), in_elements(received, arrays))
    blocks = call.group.size if sent is None else 1
    return call.run(result, arrays, results, blocks=blocks, counts=counts)


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


def _rows(call: _Call, arrays: list[Any], counts: Sequence[Any] | None) -> list[list[int]] | None:
    """The extents of all ranks' arrays, of which this rank has ``arrays``."""
    if counts is None:
        return None
    rows = checked_counts(counts, call.group, arrays)
    for array, each in zip(arrays, rows, strict=True):
        if each[call.group.rank] != _extent(array):
            raise ArgumentError(
                f"counts has {each[call.group.rank]} for this rank; its array has the shape {array.shape}"
            )
    return rows


def _extent(array: Any) -> int:
    """The extent of the first axis. Raises ArgumentError for an array without axes."""
    if not array.ndim:
        raise ArgumentError("an array of the shape () has no first axis to cut into blocks")
    return len(array)


def _blocks(call: _Call, arrays: list[Any], rows: list[list[int]] | None) -> list[tuple[int, ...]]:
    """The shapes of this rank's blocks of the arrays."""
    own = [block_extent(array, index, rows, call.group) for index, array in enumerate(arrays)]
    return [(extent, *array.shape[1:]) for array, extent in zip(arrays, own, strict=True)]


def _check_blocks(call: _Call, sources: list[Any], results: list[Any], rows: list[list[int]] | None) -> None:
    """Raises ArgumentError when the arrays of the root of a scatter do not fit its ``out``."""
    if len(sources) != len(results):
        raise ArgumentError(f"x has {len(sources)} arrays; out has {len(results)}")
    for index, (source, block) in enumerate(zip(sources, results, strict=True)):
        extent = sum(rows[index]) if rows is not None else call.group.size * _extent(block)
        wanted = (extent, *block.shape[1:])
        if source.shape != wanted:
            raise ArgumentError(f"x: array {index} has the shape {source.shape}; out asks for {wanted}")
