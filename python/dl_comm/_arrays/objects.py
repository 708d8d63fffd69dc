"""Python objects of the ranks of a group, by pickle. Unpickle only what you trust.

Every rank first says how long its pickle is, or that it has none. So all ranks raise if one cannot pickle its object,
and their next calls match.

Thread rule: any thread may call every function. The ranks of the group must all call them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from dl_comm._arrays.agreement import failing_together
from dl_comm._arrays.arguments import checked_rank
from dl_comm._arrays.collectives import all_gather, broadcast_in, gather
from dl_comm._arrays.groups import Group, given
from dl_comm._base.array_types import Object
from dl_comm._base.errors import CommError


class _Pickle:
    """The pickle of what a rank sends, or the text of the exception that it raised."""

    def __init__(self, make: Callable[[], Any] | None) -> None:
        self.failure: Exception | None = None
        data = b""
        if make is not None:
            try:
                data = pickle.dumps(make())
            except Exception as error:
                self.failure = error
                data = f"{type(error).__name__}: {error}".encode(errors="replace")
        self.data = np.frombuffer(data, np.uint8)
        self.header = np.array([len(data), self.failure is not None])

    def check(self, failed: dict[int, np.ndarray], name: str) -> None:
        """Raises if there is a rank that has failed: its exception there, and a CommError elsewhere."""
        if self.failure is not None:
            raise self.failure
        for rank, text in failed.items():
            raise CommError(
                f"rank {rank} could not pickle the object of {name}: {text.tobytes().decode(errors='replace')}"
            )


def all_gather_object(obj: Object, *, group: Group | None = None) -> list[Object]:
    """The picklable objects of all ranks, by rank. Collective. Unpickle only what you trust.

    If a rank cannot pickle its object, it raises the exception of pickle, and the others raise CommError with its text.
    """
    return _gathered(obj, None, given(group), "all_gather_object") or []


def gather_object(obj: Object, root: int = 0, *, group: Group | None = None) -> list[Object] | None:
    """The picklable objects of all ranks, by rank, on rank ``root`` of the group; None elsewhere. Collective.

    Raises as ``all_gather_object``.
    """
    members = given(group)
    with failing_together("gather_object", members):
        root = checked_rank(root, members)
    return _gathered(obj, root, members, "gather_object")


def _gathered(obj: Any, root: int | None, members: Group, name: str) -> list[Any] | None:
    own = _Pickle(lambda: obj)
    headers = all_gather(own.header, group=members, name=f"{name}: lengths").reshape(members.size, 2)
    lengths, failed = headers[:, 0].tolist(), np.flatnonzero(headers[:, 1]).tolist()
    # The other ranks than the root also raise.
    joined = (
        all_gather(own.data, group=members, name=name, counts=lengths)
        if root is None or failed
        else gather(own.data, root, group=members, name=name, counts=lengths)
    )
    if joined is None:
        return None
    parts = np.split(joined, np.cumsum(lengths)[:-1])
    own.check({rank: parts[rank] for rank in failed}, name)
    return [pickle.loads(part.tobytes()) for part in parts]


def broadcast_object(obj: Object | None = None, root: int = 0, *, group: Group | None = None) -> Object:
    """The picklable object of rank ``root`` of the group, on all its ranks. Collective.

    If the root cannot pickle it, the root raises the exception of pickle, and the others raise CommError with its text.
    """
    members = given(group)
    with failing_together("broadcast_object", members):
        root = checked_rank(root, members)
    found: Object = object_of_root(lambda: obj, root, members, "broadcast_object")
    return found


def object_of_root(make: Callable[[], Any], root: int, members: Group, name: str) -> Any:
    """The object that ``make`` returns on rank ``root`` of the group. Raises as ``broadcast_object``. Collective."""
    made: list[Any] = []

    def made_once() -> Any:
        made.append(make())
        return made[0]

    own = _Pickle(made_once if members.rank == root else None)
    header = own.header
    broadcast_in([header], root, members, name=f"{name}: length")
    length, failed = header.tolist()
    data = own.data.copy() if members.rank == root else np.empty(length, np.uint8)
    if length:
        broadcast_in([data], root, members, name=name)
    own.check({root: data} if failed else {}, name)
    return made[0] if members.rank == root else pickle.loads(data.tobytes())
