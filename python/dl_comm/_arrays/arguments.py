"""The arguments of the collectives: arrays, results, operators, ranks and counts, checked. No communication."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dl_comm._arrays.cuda_arrays import DeviceArray, any_on_gpu, device_array, handed, is_on_gpu, new_like
from dl_comm._arrays.groups import Group
from dl_comm._arrays.memory import new_result
from dl_comm._base.checks import checked_float, checked_ints, for_each, refuse_masked, refuse_missing
from dl_comm._base.errors import ArgumentError, DTypeError
from dl_comm._base.table import OPERATORS, SCALED

ADASUM = OPERATORS["adasum"]
_ANY = -1

_NUMBERS = (bool, int, float, complex)
NO_FACTORS = (1.0, 1.0)


def arrays_of(x: Any, argument: str = "x") -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The arrays of an argument, and what makes a result of the same kind from arrays.

    Those in GPU memory become a `DeviceArray`.
    """
    if isinstance(x, np.ndarray):
        refuse_masked(x, argument)
        return [x], _first
    if isinstance(x, _NUMBERS) and argument != "out":
        return [np.array(x)], lambda arrays: arrays[0].item()
    if isinstance(x, np.generic) and argument != "out":
        return [np.array(x)], lambda arrays: arrays[0][()]
    if isinstance(x, (list, tuple)):
        refuse_missing(x, argument)
        arrays = list(x)
        for index, array in enumerate(arrays):
            refuse_masked(array, f"{argument}: entry {index}")
            if isinstance(array, np.ndarray):
                continue
            if not is_on_gpu(array):
                raise DTypeError(
                    f"entry {index} of {argument} is a {type(array).__name__}; make it an array: numpy.array(...)"
                )
            arrays[index] = device_array(array, f"entry {index} of {argument}")
        return arrays, list
    if is_on_gpu(x):
        return [device_array(x, argument)], _first
    raise DTypeError(
        f"{argument} is a {type(x).__name__}; give a NumPy array, a list of them{', or a number' * (argument != 'out')}"
    )


def host_arrays_of(x: Any, argument: str = "x") -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """As ``arrays_of``, for a call that takes host memory only."""
    arrays, wrap = arrays_of(x, argument)
    if any_on_gpu(arrays):
        raise ArgumentError(f"{argument} is in GPU memory, which this call does not take; pass a copy in host memory")
    return arrays, wrap


def _first(arrays: list[Any]) -> Any:
    return arrays[0]


def is_half(dtype: np.dtype[Any]) -> bool:
    """Whether it is float16 or bfloat16."""
    return dtype.itemsize == 2 and (dtype.kind == "f" or dtype.name == "bfloat16")


def kind_of(x: Any) -> Callable[[list[Any]], Any]:
    return list if isinstance(x, (list, tuple)) else _first


def nothing() -> None:
    return None


def returned(out: Any, results: list[Any], wrap: Callable[[list[Any]], Any]) -> Callable[[], Any]:
    return (lambda: wrap([handed(result) for result in results])) if out is None else (lambda: out)


def results_like(out: Any, arrays: list[Any], shapes: list[tuple[int, ...]]) -> list[Any]:
    """The arrays of ``out``, or new ones, with these shapes and the types of ``arrays``."""
    if out is None:
        try:
            return [_new(array, shape) for array, shape in zip(arrays, shapes, strict=True)]
        except (ValueError, OverflowError) as error:
            raise ArgumentError(f"the result of the shape {shapes[0]} is longer than memory can be") from error
    results, _ = arrays_of(out, "out")
    if len(results) != len(arrays):
        raise ArgumentError(f"out has {len(results)} arrays; the call has {len(arrays)}")
    for index, (result, array, shape) in enumerate(zip(results, arrays, shapes, strict=True)):
        if result.shape != shape or result.dtype != array.dtype:
            raise ArgumentError(
                f"out: array {index} has the shape {result.shape} and type {result.dtype}; "
                f"the result has {shape} and {array.dtype}"
            )
    return results


def _new(array: Any, shape: tuple[int, ...]) -> Any:
    return new_like(array, shape) if isinstance(array, DeviceArray) else new_result(shape, array.dtype)


def operator_code(op: str, prescale: float, postscale: float) -> tuple[int, tuple[float, float]]:
    if not isinstance(op, str) or op not in OPERATORS:
        raise ArgumentError(f"invalid op: {op!r} (expected one of {', '.join(map(repr, OPERATORS))})")
    factors = (checked_float("prescale", prescale), checked_float("postscale", postscale))
    if factors == NO_FACTORS:
        return OPERATORS[op], factors
    if op not in SCALED:
        raise ArgumentError(f"op={op!r} takes no prescale and postscale")
    return SCALED[op], factors


def checked_rank(root: Any, group: Group, argument: str = "root") -> int:
    if isinstance(root, bool) or not isinstance(root, (int, np.integer)) or not 0 <= root < group.size:
        raise ArgumentError(f"invalid {argument}: {root!r} (expected a rank of the group, 0 to {group.size - 1})")
    return int(root)


def checked_source(source: Any, group: Group) -> int:
    return _ANY if source is None else checked_rank(source, group, "source")


def checked_tag(tag: Any) -> int:
    if tag is None:
        return _ANY
    if isinstance(tag, bool) or not isinstance(tag, (int, np.integer)) or not 0 <= tag < 2**31:
        raise ArgumentError(f"invalid tag: {tag!r} (expected an integer from 0 to {2**31 - 1})")
    return int(tag)


def checked_counts(counts: Sequence[Any], group: Group, arrays: list[Any], whole: bool = False) -> list[list[int]]:
    """The counts of each array as a list. ``whole``: the arrays have all of these blocks."""
    found = []
    for array, each in zip(arrays, for_each("counts", counts, len(arrays)), strict=True):
        listed = checked_ints("counts", each, 0, 2**62)
        if len(listed) != group.size:
            raise ArgumentError(f"invalid counts: {listed} (expected {group.size} extents, one for each rank)")
        if whole and array.shape[:1] != (sum(listed),):
            raise ArgumentError(
                f"the counts {listed} have the sum {sum(listed)}; the array has the shape {array.shape}"
            )
        found.append(listed)
    return found


def in_elements(rows: list[list[int]] | None, arrays: list[Any]) -> list[int] | None:
    """Extents of the first axes as numbers of elements, those of the first array first."""
    if rows is None:
        return None
    each = [int(np.prod(array.shape[1:], dtype=np.int64)) for array in arrays]
    return [extent * elements for extents, elements in zip(rows, each, strict=True) for extent in extents]


def block_extent(array: Any, index: int, rows: list[list[int]] | None, group: Group) -> int:
    """The extent of this rank's block of an array."""
    if rows is not None:
        return rows[index][group.rank]
    if array.ndim == 0 or len(array) % group.size:
        raise ArgumentError(
            f"array {index} has the shape {array.shape}; its first axis must be a multiple of the {group.size} ranks"
        )
    return int(len(array)) // group.size
