"""Lists of tensors, and lists of such lists: one for each replica of a model in a process (tower).

Thread rule: pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dl_comm._base.errors import ArgumentError, DTypeError


def as_towers(tensors: Any, argument: str = "gradients") -> tuple[int | None, list[Any]]:
    """The number of towers (None for a single list of tensors), and the tensors of all towers in one list.

    Raises ArgumentError when a list is empty, contains None, or differs in length; DTypeError when it is not a list.
    """
    given = listed(tensors, argument)
    if not all(isinstance(tower, (list, tuple)) for tower in given):
        return None, given
    towers = [listed(tower, argument) for tower in given]
    for index, tower in enumerate(towers):
        if len(tower) != len(towers[0]):
            raise ArgumentError(
                f"tower {index} has {len(tower)} tensors and tower 0 has {len(towers[0])}; all towers must be equal"
            )
    return len(towers), [tensor for tower in towers for tensor in tower]


def in_towers(tensors: list[Any], towers: int) -> list[list[Any]]:
    """The reverse of ``as_towers``."""
    count = len(tensors) // towers
    return [tensors[start : start + count] for start in range(0, len(tensors), count)]


def is_single(tensors: Any) -> bool:
    """Whether it is one array, tensor or number instead of a list."""
    return hasattr(tensors, "shape") or isinstance(tensors, (bool, int, float, complex))


def listed(tensors: Sequence[Any], function: str) -> list[Any]:
    """The tensors in a list.

    Raises ArgumentError when it is empty or contains None; DTypeError when it is not a list.
    """
    if hasattr(tensors, "shape") or not hasattr(tensors, "__iter__"):
        raise DTypeError(f"{function} takes a list, not a {type(tensors).__name__}; wrap it: [tensor]")
    tensors = list(tensors)
    if not tensors:
        raise ArgumentError(f"the list is empty; {function} needs at least one tensor")
    for index, tensor in enumerate(tensors):
        if tensor is None:
            raise ArgumentError(f"tensor {index} is None; pass only the gradients that exist, the same on all ranks")
    return tensors
