"""A stack of communicators, as in TorchMPI, and grids of groups.

A level splits every group of the level below: the ranks with the same key make a ``local`` group. The collectives
without a group run on the current level; a span of several levels makes ``allreduce`` go through them, from the
innermost out.

Thread rule: the stack belongs to the process; all ranks change it in the same order, while no call is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from dl_comm._arrays.agreement import failing_together
from dl_comm._arrays.collectives import all_gather, allreduce
from dl_comm._arrays.groups import Group, given, world
from dl_comm._base.checks import checked_int
from dl_comm._base.errors import ArgumentError
from dl_comm._job import state
from dl_comm._job.state import Job


@dataclass(frozen=True)
class Communicator:
    """A level of the stack, as this rank sees it.

    Attributes:
        level: 0 is the level of all ranks.
        key: The key that this rank has pushed.
        local: The ranks of the level below with the same key.
        cross: The ranks of the level below that have this rank's place in their local groups. In a tree the first ranks
            of the local groups; None on the other ranks.
        cartesian: Whether all local groups have the same size; otherwise the level is a tree.
        num_groups: The number of local groups in the level below.
    """

    level: int
    key: str
    local: Group
    cross: Group | None
    cartesian: bool
    num_groups: int


on_change: list[Callable[[], None]] = []
"""Called when the span has changed."""
on_pop: list[Callable[[Group], None]] = []
"""Called with the local group of a level that is removed."""


def push_communicator(key: Any, *, cartesian: bool | None = None) -> int:
    """Splits the groups of the last level by ``key`` and pushes the result. Collective over all ranks.

    Args:
        key: Ranks with the same ``str(key)`` make a group, for example a host's name or ``rank // 4``.
        cartesian: True: the local groups must have equal sizes. False: a tree, even if they have. None: by their sizes.

    Returns:
        The new level. The current level stays.

    Raises:
        ArgumentError: ``cartesian`` is True and the sizes differ.
    """
    parent = communicator(len(state.current.communicators)).local
    with failing_together("push_communicator", parent):
        text = str(key)
    data = np.frombuffer(text.encode(), np.uint8)
    lengths = all_gather(np.array([len(data)]), group=parent, name="push_communicator: lengths").tolist()
    joined = all_gather(data, group=parent, name="push_communicator", counts=lengths)
    keys = [part.tobytes().decode() for part in np.split(joined, np.cumsum(lengths)[:-1])]
    members: dict[str, list[int]] = {}
    for place, other in enumerate(keys):
        members.setdefault(other, []).append(parent.ranks[place])
    sizes = sorted({len(ranks) for ranks in members.values()})
    # The groups of the level below may be split differently.
    is_equal = bool(allreduce(int(len(sizes) == 1), "min", group=world(), name="push_communicator: sizes"))
    if cartesian and not is_equal:
        raise ArgumentError(f"cartesian=True needs local groups of equal size; here the sizes are {sizes}")
    is_cartesian = is_equal and cartesian is not False
    level = len(state.current.communicators) + 1
    local = Group(members[text], f"level {level}, {text}")
    column = local.rank if is_cartesian else 0
    cross = None
    if is_cartesian or local.rank == 0:
        cross = Group([ranks[column] for ranks in members.values()], f"level {level}, cross {column}")
    state.current.communicators.append(Communicator(level, text, local, cross, is_cartesian, len(members)))
    return level


def pop_communicator() -> None:
    """Removes the last level and frees its groups. Collective.

    Raises:
        ArgumentError: There is no level, or a span uses it.
    """
    if not state.current.communicators:
        raise ArgumentError("there is no level to remove; level 0 stays")
    if state.current.span[1] >= len(state.current.communicators):
        raise ArgumentError(f"level {len(state.current.communicators)} is in use; call set_communicator(0) first")
    last = state.current.communicators.pop()
    for popped in on_pop:
        popped(last.local)
    last.local.free()
    if last.cross is not None:
        last.cross.free()


def communicator(level: int | None = None) -> Communicator:
    """A level of the stack; None: the current one. Raises ArgumentError if there is no such level."""
    level = _checked(state.current.span[0] if level is None else level)
    return state.current.communicators[level - 1] if level else Communicator(0, "world", world(), None, True, 1)


def communicator_names() -> list[str]:
    """A line for each level: its kind, this rank's key, and sizes."""
    lines = []
    for each in (communicator(level) for level in range(len(state.current.communicators) + 1)):
        kind, local = "cartesian" if each.cartesian else "tree", each.local
        groups = f"{each.num_groups} group{'s' if each.num_groups > 1 else ''}"
        lines.append(f"{each.level}: {each.key} ({kind}, {groups}, rank {local.rank} of {local.size})")
    return lines


@contextmanager
def _restored(job: Job, span: tuple[int, int]) -> Iterator[None]:
    try:
        yield
    finally:
        # After a `finalize` or a pop the levels may be gone.
        if job is state.current:
            _set_span(*(span if span[1] <= len(job.communicators) else (0, 0)))


def set_communicator(level: int) -> Any:
    """Makes ``level`` the current one: collectives without ``group=`` run on its local groups. Not collective.

    Returns:
        A context manager that restores the level before.
    """
    return collective_span(level, level)


def collective_span(begin: int, end: int) -> Any:
    """Lets collectives run on the local groups of level ``begin``, and ``allreduce`` through the levels to ``end``.

    Such an allreduce runs within the local groups of the innermost level, then across them, level by level. In a
    cartesian level every rank takes part in both; in a tree the first ranks of the groups do the second step and
    broadcast. The result has the same bits on all ranks, but not those of one step: it adds in another order. Without a
    span, the core itself uses the hosts' structure, and is faster. Not collective; equal on all ranks.

    Returns:
        A context manager that restores the span before.

    Raises:
        ArgumentError: A level does not exist, or ``end`` is before ``begin``.
    """
    before = state.current.span
    if _checked(end) < _checked(begin):
        raise ArgumentError(f"the span ends at level {end}, before it begins at {begin}")
    _set_span(begin, end)
    return _restored(state.current, before)


def _checked(level: Any) -> int:
    if (
        isinstance(level, bool)
        or not isinstance(level, (int, np.integer))
        or not 0 <= level <= len(state.current.communicators)
    ):
        raise ArgumentError(f"invalid level: {level!r} (expected 0 to {len(state.current.communicators)})")
    return int(level)


def span() -> tuple[int, int]:
    """The first and the last level of the span."""
    return state.current.span


def _set_span(begin: int, end: int) -> None:
    state.current.span = (begin, end)
    for changed in on_change:
        changed()


class Grid:
    """A grid of ranks with named axes; see ``grid``. As a context manager it frees its groups.

    Attributes:
        shape: The extent of each axis.
        coordinates: This rank's index on each axis.
        groups: For each axis, the ranks that differ on it only; also an attribute of the axis's name.
    """

    def __init__(self, shape: dict[str, int], parent: Group) -> None:
        self.shape = shape
        places = np.arange(parent.size).reshape(tuple(shape.values()))
        own = np.argwhere(places == parent.rank)[0].tolist()
        self.coordinates: dict[str, int] = dict(zip(shape, own, strict=True))
        self.groups: dict[str, Group] = {}
        for index, axis in enumerate(shape):
            line = places[tuple(slice(None) if i == index else at for i, at in enumerate(own))]
            self.groups[axis] = Group([parent.ranks[place] for place in line], f"grid {axis}")

    def __getattr__(self, axis: str) -> Group:
        groups = self.__dict__.get("groups", {})
        if axis not in groups:
            raise AttributeError(f"the grid has the axes {', '.join(groups)}, not {axis}")
        group: Group = groups[axis]
        return group

    def free(self) -> None:
        """Frees the groups on this rank."""
        for group in self.groups.values():
            group.free()

    def __enter__(self) -> Grid:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free()

    def __repr__(self) -> str:
        axes = ", ".join(f"{axis}={self.coordinates[axis]} of {extent}" for axis, extent in self.shape.items())
        return f"<dl_comm.Grid {axes}>"


def grid(*, group: Group | None = None, **axes: int) -> Grid:
    """Arranges ranks in a grid and makes a group for each axis: ``grid(data=4, model=2)``. Collective.

    ``grid.data`` has the ranks that hold the same part of the model and average its gradients; ``grid.model`` those
    that share a replica. The last axis has neighbouring ranks, as in torch's DeviceMesh.

    Args:
        group: The ranks; None: all.
        **axes: Their extents, whose product is the number of ranks; one may be -1: the rest.

    Raises:
        ArgumentError: The product is not the number of ranks, or an axis has a name that Grid uses.
    """
    parent = given(group)
    shape = {axis: checked_int(axis, extent, -1) for axis, extent in axes.items()}
    taken = [axis for axis in shape if hasattr(Grid, axis) or axis in ("shape", "coordinates", "groups")]
    if taken or not shape:
        raise ArgumentError(f"invalid axes: {', '.join(taken) or 'none'} (give names that Grid does not use)")
    known = math.prod(extent for extent in shape.values() if extent != -1)
    free = [axis for axis, extent in shape.items() if extent == -1]
    if len(free) == 1 and known > 0 and parent.size % known == 0:
        shape[free[0]] = parent.size // known
    if min(shape.values()) < 1 or math.prod(shape.values()) != parent.size:
        wanted = " x ".join(f"{axis}={extent}" for axis, extent in axes.items())
        raise ArgumentError(f"the grid {wanted} does not have {parent.size} ranks")
    return Grid(shape, parent)
