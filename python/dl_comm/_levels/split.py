"""The groups of the ranks with equal numbers.

Thread rule: as for a group.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from dl_comm._arrays.agreement import failing_together
from dl_comm._arrays.collectives import all_gather
from dl_comm._arrays.groups import Group, given
from dl_comm._base.checks import checked_text
from dl_comm._base.errors import ArgumentError


def split(color: int | None, key: int = 0, *, group: Group | None = None, name: str = "") -> Group | None:
    """Splits a group: the ranks with the same ``color`` make one, as ``MPI_Comm_split``. Collective.

    Args:
        color: A number; None: this rank is in no new group.
        key: Orders the ranks of a new group; equal keys are ordered by rank.
        group: The group to split; None: all ranks.
        name: Stands in error messages.

    Returns:
        The new group of this rank, or None.

    Raises:
        ArgumentError: ``color`` or ``key`` is no integer; the other ranks raise MismatchError.
    """
    parent = given(group)
    with failing_together("split", parent):
        mine = _checked_color(color, key)
        checked_text("name", name)
    rows = all_gather(mine, group=parent, name="split").reshape(parent.size, 3)
    if color is None:
        return None
    members = [rank for rank in range(parent.size) if rows[rank, 2] and rows[rank, 0] == mine[0]]
    members.sort(key=lambda rank: int(rows[rank, 1]))
    return Group([parent.ranks[rank] for rank in members], name or f"split {color}")


def _checked_color(color: Any, key: Any) -> np.ndarray:
    try:
        numbers = (0 if color is None else operator.index(color), operator.index(key), color is not None)
        return np.array(numbers, dtype=np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(f"invalid color {color!r} or key {key!r} (expected integers of 64 bits)") from error
