"""Checks of arguments that need neither the core nor a group: each returns the value, or raises an error that names it.

Thread rule: any thread may call every function.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from dl_comm._base.errors import ArgumentError, DTypeError, NoTensorError


def checked_int(name: str, value: Any, low: int, high: int = 2**31 - 1) -> int:
    """``value`` as an int; accepts NumPy integers and other types with ``__index__``."""
    try:
        number = operator.index(value)
    except TypeError:
        number = low - 1
    if not low <= number <= high:
        raise ArgumentError(f"invalid {name}: {value!r} (expected an integer from {low} to {high})")
    return number


def checked_threads(threads: Any, nthread_per_team: Any, default: int | None = None) -> int | None:
    """The threads of a team, given by either name; ``default``: ``nthread_per_team``, the plugin's, if not given."""
    if threads is None:
        return None if nthread_per_team is None else checked_int("nthread_per_team", nthread_per_team, 1)
    if nthread_per_team not in (default, threads):
        raise ArgumentError(
            f"threads is {threads!r}, and nthread_per_team, another name of it, {nthread_per_team!r}; give one of them"
        )
    return checked_int("threads", threads, 1)


def checked_float(name: str, value: Any) -> float:
    """``value`` as a float; accepts what has one number, such as a NumPy scalar, but no text."""
    if type(value) is float:
        return value
    try:
        is_complex = isinstance(value, (np.ndarray, np.generic)) and np.iscomplexobj(value)
        if not is_complex and not isinstance(value, (str, bytes)):
            return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    raise ArgumentError(f"invalid {name}: {value!r} (expected a number)")


def checked_flag(name: str, value: Any) -> bool:
    """``value`` as a bool; accepts 0 and 1."""
    if isinstance(value, (bool, np.bool_)) or isinstance(value, (int, np.integer)) and 0 <= value <= 1:
        return bool(value)
    raise ArgumentError(f"invalid {name}: {value!r} (expected True or False)")


def checked_ints(name: str, values: Any, low: int, high: int = 2**31 - 1) -> list[int]:
    """``values`` as a list of ints."""
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        raise ArgumentError(f"invalid {name}: {values!r} (expected a list of integers)")
    try:
        listed = list(values)
    except TypeError as error:  # an array without axes
        raise ArgumentError(f"invalid {name}: {values!r} (expected a list of integers)") from error
    return [checked_int(f"{name}, entry {index}", value, low, high) for index, value in enumerate(listed)]


def for_each(name: str, counts: Any, arrays: int) -> list[Any]:
    """The extents of the blocks of each of so many arrays: ``counts`` is a list of them, or those of the only one."""
    is_nested = isinstance(counts, (list, tuple)) and any(
        isinstance(entry, (list, tuple, range)) or (getattr(entry, "ndim", 0) or 0) > 0 for entry in counts
    )
    lists = list(counts) if is_nested else [counts]
    if len(lists) != arrays:
        raise ArgumentError(
            f"invalid {name}: {counts!r} (expected a list for each of the {arrays} arrays, not {len(lists)})"
        )
    return lists


def checked_text(name: str, value: Any) -> str:
    """``value``, which the core takes as text."""
    if not isinstance(value, str):
        raise DTypeError(f"invalid {name}: {value!r} (expected a string)")
    if "\0" in value or not value.isascii() and value.encode(errors="ignore").decode() != value:
        raise ArgumentError(f"invalid {name}: {value!r} (expected Unicode text without NUL characters)")
    return value


def checked_path(name: str, value: Any) -> str:
    """The path of a file or folder as text."""
    try:
        path = os.fspath(value)
    except TypeError as error:
        raise ArgumentError(f"invalid {name}: {value!r} (expected a path)") from error
    if isinstance(path, bytes):
        path = os.fsdecode(path)
    return checked_text(name, path) if "\0" in path else path


def checked_name(name: Any) -> None:
    """Raises DTypeError when the name of a call is not a string, ArgumentError when the core does not support it."""
    if name is not None:
        checked_text("name", name)


def checked_by_name(by_name: Any, name: Any) -> bool:
    """Whether a call matches by its name, which it then needs."""
    if not checked_flag("by_name", by_name):
        return False
    if not name:
        raise ArgumentError("by_name=True needs a name: give name=")
    return True


def checked_team(team: Any) -> int:
    """The number of a team as an int. Raises ArgumentError when it is invalid."""
    return _number("team", team)


def checked_root(root: Any) -> int:
    """The root as an int. Raises ArgumentError when it is not an integer >= 0; does not compare it with the size."""
    return _number("rank", root, "root")


def _number(what: str, value: Any, argument: str | None = None) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number < 2**31:
        raise ArgumentError(f"{argument or what} {value!r} is out of range; {what}s go from 0")
    return number


def seconds(timeout: float | None) -> float:
    """``timeout`` in the core's format: -1 for None, which means the team's deadline.

    Raises ArgumentError when it is negative or not a number.
    """
    if timeout is None:
        return -1.0
    is_number = isinstance(timeout, (int, float, np.integer, np.floating)) and not isinstance(timeout, bool)
    if not is_number or not timeout >= 0:
        raise ArgumentError(f"invalid timeout: {timeout!r} (expected seconds, or 0 for no limit)")
    return checked_float("timeout", timeout)


def refuse_missing(entries: Sequence[Any], argument: str) -> None:
    """Raises ArgumentError when a list of tensors has no entry, NoTensorError when one is None."""
    if not entries:
        raise ArgumentError(f"{argument} is empty; give at least one tensor")
    for index, entry in enumerate(entries):
        if entry is None:
            raise NoTensorError(f"{argument}: entry {index} is None; pass only what exists, the same on all ranks")


def refuse_masked(value: Any, argument: str) -> None:
    """Raises NoTensorError for a masked array."""
    if isinstance(value, np.ma.MaskedArray):
        raise NoTensorError(f"{argument} is masked, and masks may differ between ranks: pass array.filled(0)")
