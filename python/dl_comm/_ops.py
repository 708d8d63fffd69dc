"""Collectives on NumPy arrays and numbers, on all ranks or on a group.

Tensors of a framework go to its binding.

Thread rule: any thread may call every function. The ranks of the group must all call the collective ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from dl_comm import _dl_comm
from dl_comm._arguments import (
    NO_FACTORS,
    OPERATORS,
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
from dl_comm._checks import checked_flag, checked_name, seconds
from dl_comm._errors import ArgumentError
from dl_comm._groups import Group, given, is_of_all
from dl_comm._memory import new_result_like
from dl_comm._types import Arrays, Operator, Values
from dl_comm._work import Work, limit

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from dl_comm._types import Exchanged, Options, Ragged, Scaled, ScaledBlocks, Scattered

# The codes of dl_comm.h.
_ALLREDUCE, _BROADCAST, _BARRIER, _REDUCE, _ALLGATHER, _GATHER, _SCATTER, _REDUCE_SCATTER, _ALLTOALL = range(1, 10)


class _Call:
    """The arguments that all collectives share."""

    def __init__(
        self, collective: int, group: Group | None, name: str | None, timeout: float | None, async_op: bool
    ) -> None:
        checked_name(name)
        self.name, self.timeout, self.async_op = name, limit(timeout), checked_flag("async_op", async_op)
        self.collective, self.group = collective, given(group, collective, async_op=self.async_op)

    def __call__(
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
        what = (self.collective, operator, root, blocks, sources, destinations)
        spec = (*what, *counts, self.name, self.timeout, factors)
        handle = self.group.handle
        if self.async_op:
            return Work(handle.start(spec), lambda _: result())
        handle.run(spec)
        return result()


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
    """Reduces arrays element by element over the ranks; every rank gets the result. Collective.

    Args:
        x: A NumPy array (C-contiguous), a number, or a list of arrays, which is one call. Shapes and types are the same
            on all ranks. Tensors: as ``dl_comm.torch.allreduce`` and ``dl_comm.tensorflow.allreduce``.
        op: ``"sum"``, ``"mean"``, ``"min"``, ``"max"``, ``"product"``, ``"bit_and"``, ``"bit_or"``, ``"bit_xor"`` or
            ``"adasum"``. `docs/collectives.md` lists the element types of each; means of integers round toward zero.
        group: The ranks that take part; None: all.
        name: A name that must be the same on all ranks; error messages contain it.
        timeout: The deadline in seconds (0: no limit), instead of the group's.
        out: Arrays for the results, like ``x``; ``out=x`` works in place.
        prescale: A factor of every input of a sum of floating-point numbers.
        postscale: A factor of the sum.
        async_op: Return a ``Work`` at once. Until it has ended, nobody else may use the arrays.

    Returns:
        ``out``, or new arrays or a number of the type of ``x``; with ``async_op`` a ``Work`` of it.

    Raises:
        ArgumentError: An argument is invalid, or an array is not contiguous.
        DTypeError: ``x`` is not an array or number, or ``op`` does not take its element type.
        MismatchError: The ranks issued different collectives. Nothing was written, and the next call works.
        TimeoutError: The ranks in the message missed the deadline; the group refuses further calls.
        PeerLostError: A rank of the group has ended; the group refuses further calls.
        StateError: ``init`` was not called, or ``finalize`` was.
    """
    is_plain = type(x) is np.ndarray and (out is x or out is None)
    is_short = type(prescale) is float is type(postscale) and type(op) is str and (name is None or type(name) is str)
    if is_plain and is_short and async_op is False and prescale == 1.0 == postscale and op in OPERATORS:
        # Such an array needs no checks here, and a short call no more than this.
        result = new_result_like(x) if out is None else x
        spec = (_ALLREDUCE, OPERATORS[op], 0, 1, [x], [result], None, None, name, limit(timeout), NO_FACTORS)
        given(group, _ALLREDUCE).handle.run(spec)
        return result
    call = _Call(_ALLREDUCE, group, name, timeout, async_op)
    arrays, wrap = arrays_of(x)
    results = results_like(out, arrays, [array.shape for array in arrays])
    operator, factors = operator_code(op, prescale, postscale)
    result = returned(out, results, wrap)
    return call(result, arrays, results, operator=operator, factors=factors)


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
    """Reduces arrays over the ranks; rank ``root`` of the group gets the result. Collective.

    Arguments and errors are those of ``allreduce`` (without ``"adasum"``); ``out`` is used on the root only.

    Returns:
        On the root as ``allreduce``, on the other ranks None.
    """
    call = _Call(_REDUCE, group, name, timeout, async_op)
    root = checked_rank(root, call.group)
    arrays, wrap = arrays_of(x)
    operator, _ = operator_code(op, 1.0, 1.0)
    if call.group.rank != root:
        return call(nothing, arrays, None, operator=operator, root=root)
    results = results_like(out, arrays, [array.shape for array in arrays])
    return call(returned(out, results, wrap), arrays, results, operator=operator, root=root)


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
) -> NDArray[Any]: ...


@overload
def all_gather(
    x: complex, *, group: Group | None = ..., async_op: Literal[True], **options: Unpack[Ragged]
) -> Work[NDArray[Any]]: ...


@overload
def all_gather(
    x: complex, *, group: Group | None = ..., async_op: bool = ..., **options: Unpack[Ragged]
) -> NDArray[Any] | Work[NDArray[Any]]: ...


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
    """Joins the arrays of all ranks along the first axis, in the order of the ranks; every rank gets the result.

    Collective.

    Args:
        x: As for ``allreduce``. A number or an array without axes counts as an array of one element.
        group: As for ``allreduce``.
        name: As for ``allreduce``.
        timeout: As for ``allreduce``.
        out: As for ``allreduce``.
        counts: The extents of the first axis of every rank's array, if they differ; the same on all ranks. One array.
        ragged: The extents differ, and the ranks exchange them first.
        async_op: As for ``allreduce``.

    Returns:
        ``out`` or new arrays, of which the first axis has the sum of the extents; with ``async_op`` a ``Work`` of it.
    """
    call = _Call(_ALLGATHER, group, name, timeout, async_op)
    arrays = [np.atleast_1d(array) for array in arrays_of(x)[0]]
    rows = _rows(call, arrays, counts, ragged)
    results = _joined(call, out, arrays, rows)
    result = returned(out, results, kind_of(x))
    return call(result, arrays, results, counts=(in_elements(rows, arrays[0]), None))


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
) -> NDArray[Any] | None: ...


@overload
def gather(
    x: complex, root: int = ..., *, group: Group | None = ..., async_op: Literal[True], **options: Unpack[Ragged]
) -> Work[NDArray[Any] | None]: ...


@overload
def gather(
    x: complex, root: int = ..., *, group: Group | None = ..., async_op: bool = ..., **options: Unpack[Ragged]
) -> NDArray[Any] | None | Work[NDArray[Any] | None]: ...


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
    """As ``all_gather``, but only rank ``root`` of the group gets the result; the others get None. Collective."""
    call = _Call(_GATHER, group, name, timeout, async_op)
    root = checked_rank(root, call.group)
    arrays = [np.atleast_1d(array) for array in arrays_of(x)[0]]
    rows = _rows(call, arrays, counts, ragged)
    elements = in_elements(rows, arrays[0])
    if call.group.rank != root:
        return call(nothing, arrays, None, root=root, counts=(elements, None))
    results = _joined(call, out, arrays, rows)
    result = returned(out, results, kind_of(x))
    return call(result, arrays, results, root=root, counts=(elements, None))


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
    """Cuts the arrays of rank ``root`` along the first axis into a block for each rank. Collective.

    Args:
        x: On the root as for ``allreduce``; the other ranks pass None.
        root: The rank of the group that has the arrays.
        out: The arrays for this rank's blocks.
        group: As for ``allreduce``.
        name: As for ``allreduce``.
        timeout: As for ``allreduce``.
        counts: The extents of the blocks' first axes, if they differ; the same on all ranks. One array.
        async_op: As for ``allreduce``.

    Returns:
        ``out``; with ``async_op`` a ``Work`` of it.
    """
    call = _Call(_SCATTER, group, name, timeout, async_op)
    root = checked_rank(root, call.group)
    if out is None:
        raise ArgumentError("out is None; scatter needs the arrays for this rank's blocks")
    results, _ = arrays_of(out, "out")
    rows = _rows(call, results, counts, False)
    sources = None
    if call.group.rank == root:
        sources, _ = arrays_of(x)
        if len(sources) != len(results):
            raise ArgumentError(f"x has {len(sources)} arrays; out has {len(results)}")
        for index, (source, block) in enumerate(zip(sources, results, strict=True)):
            wanted = (sum(rows) if rows is not None else call.group.size * _extent(block), *block.shape[1:])
            if source.shape != wanted:
                raise ArgumentError(f"x: array {index} has the shape {source.shape}; out asks for {wanted}")
    elements = in_elements(rows, results[0])
    return call(lambda: out, sources, results, root=root, counts=(elements, None))


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
    """Reduces arrays over the ranks and cuts the result along the first axis into a block for each rank. Collective.

    Args:
        x: As for ``allreduce``, without numbers. The first axis is a multiple of the number of ranks, unless
            ``counts`` is given.
        op: As for ``allreduce``, without ``"adasum"``.
        group: As for ``allreduce``.
        name: As for ``allreduce``.
        timeout: As for ``allreduce``.
        out: As for ``allreduce``.
        counts: The extents of the blocks' first axes, if they differ; the same on all ranks. One array.
        prescale: As for ``allreduce``.
        postscale: As for ``allreduce``.
        async_op: As for ``allreduce``.

    Returns:
        ``out`` or new arrays with this rank's blocks; with ``async_op`` a ``Work`` of it.
    """
    call = _Call(_REDUCE_SCATTER, group, name, timeout, async_op)
    arrays, _ = arrays_of(x)
    rows = None if counts is None else checked_counts(counts, call.group, arrays)
    own = [block_extent(array, index, rows, call.group) for index, array in enumerate(arrays)]
    results = results_like(out, arrays, [(extent, *array.shape[1:]) for array, extent in zip(arrays, own, strict=True)])
    operator, factors = operator_code(op, prescale, postscale)
    counted = (in_elements(rows, arrays[0]), None)
    result = returned(out, results, kind_of(x))
    return call(result, arrays, results, operator=operator, counts=counted, factors=factors)


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
    """Sends block r of every array, along the first axis, to rank r; the result has a block from each rank. Collective.

    Args:
        x: As for ``allreduce``, without numbers. The first axis is a multiple of the number of ranks, unless
            ``send_counts`` is given.
        group: As for ``allreduce``.
        name: As for ``allreduce``.
        timeout: As for ``allreduce``.
        out: As for ``allreduce``.
        send_counts: The extents of the first axes of the blocks that this rank sends, if they differ. One array.
        receive_counts: The same of those that it receives; None with ``send_counts``: the ranks exchange them
            first. All ranks give it, or none does.
        async_op: As for ``allreduce``.

    Returns:
        ``out`` or new arrays; with ``async_op`` a ``Work`` of it.
    """
    call = _Call(_ALLTOALL, group, name, timeout, async_op)
    arrays, _ = arrays_of(x)
    size = call.group.size
    if send_counts is None:
        if receive_counts is not None:
            raise ArgumentError("receive_counts without send_counts; give both")
        for index, array in enumerate(arrays):
            block_extent(array, index, None, call.group)
        results = results_like(out, arrays, [array.shape for array in arrays])
        return call(returned(out, results, kind_of(x)), arrays, results, blocks=size)
    sent = checked_counts(send_counts, call.group, arrays)
    if receive_counts is None:
        exchanged = all_to_all(
            np.array(sent), group=call.group, name=f"{name or 'all_to_all'}: counts", timeout=timeout
        )
        receive_counts = exchanged.tolist()
    received = checked_counts(receive_counts, call.group, None)
    results = results_like(out, arrays, [(sum(received), *arrays[0].shape[1:])])
    counts = (in_elements(sent, arrays[0]), in_elements(received, arrays[0]))
    return call(returned(out, results, kind_of(x)), arrays, results, counts=counts)


def broadcast_in(
    arrays: list[Any],
    root: int,
    group: Group | None,
    timeout: float | None = None,
    async_op: bool = False,
    name: str | None = None,
) -> Any:
    """Copies arrays from rank ``root`` of a group, in place."""
    call = _Call(_BROADCAST, group, name, timeout, async_op)
    return call(lambda: arrays, arrays, arrays, root=checked_rank(root, call.group))


def barrier(*, timeout: float | None = None, group: Group | None = None) -> None:
    """Returns when every rank has called it. Collective.

    Args:
        group: The ranks that take part; None: all.
        timeout: The deadline in seconds, instead of ``DL_COMM_TIMEOUT_S``; 0: no limit.

    Raises:
        TimeoutError: A rank missed the deadline.
        PeerLostError: A rank has ended.
    """
    if is_of_all(group):
        _dl_comm.barrier(seconds(timeout))
        return
    _Call(_BARRIER, group, None, timeout, False)(nothing, [], [])


def _rows(call: _Call, arrays: list[Any], counts: Sequence[int] | None, ragged: bool) -> list[int] | None:
    """The extents of all ranks' arrays, if they differ."""
    if not checked_flag("ragged", ragged) and counts is None:
        return None
    one_array(arrays)
    if counts is None:
        name = f"{call.name or 'gather'}: extents"
        limit = None if call.timeout == 0 else max(call.timeout, 0.0)
        rows: list[int] = all_gather(np.array([len(arrays[0])]), group=call.group, name=name, timeout=limit).tolist()
        return rows
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


def _joined(call: _Call, out: Any, arrays: list[Any], rows: list[int] | None) -> list[Any]:
    """The arrays for the joined blocks of all ranks."""
    totals = [sum(rows) if rows is not None else call.group.size * len(array) for array in arrays]
    shapes = [(total, *array.shape[1:]) for array, total in zip(arrays, totals, strict=True)]
    return results_like(out, arrays, shapes)
