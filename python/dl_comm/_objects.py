"""Python objects of the ranks of a group, by pickle. Unpickle only what you trust.

Thread rule: any thread may call every function. The ranks of the group must all call them.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from dl_comm._arguments import checked_rank
from dl_comm._groups import Group, given
from dl_comm._ops import all_gather, broadcast_in, gather


def all_gather_object(obj: Any, *, group: Group | None = None) -> list[Any]:
    """The picklable objects of all ranks, by rank. Collective. Unpickle only what you trust."""
    members = given(group)
    data = np.frombuffer(pickle.dumps(obj), np.uint8)
    lengths = all_gather(np.array([len(data)]), group=members, name="all_gather_object: lengths")
    joined = all_gather(data, group=members, name="all_gather_object", counts=lengths.tolist())
    return [pickle.loads(part.tobytes()) for part in np.split(joined, np.cumsum(lengths)[:-1])]


def gather_object(obj: Any, root: int = 0, *, group: Group | None = None) -> list[Any] | None:
    """The picklable objects of all ranks, by rank, on rank ``root`` of the group; None elsewhere. Collective."""
    members = given(group)
    data = np.frombuffer(pickle.dumps(obj), np.uint8)
    lengths = all_gather(np.array([len(data)]), group=members, name="gather_object: lengths")
    joined = gather(data, root, group=members, name="gather_object", counts=lengths.tolist())
    if joined is None:
        return None
    return [pickle.loads(part.tobytes()) for part in np.split(joined, np.cumsum(lengths)[:-1])]


def broadcast_object(obj: Any = None, root: int = 0, *, group: Group | None = None) -> Any:
    """The picklable object of rank ``root`` of the group, on all its ranks. Collective."""
    members = given(group)
    root = checked_rank(root, members)
    is_root = members.rank == root
    data = np.frombuffer(pickle.dumps(obj) if is_root else b"", np.uint8)
    length = np.array([len(data)])
    broadcast_in([length], root, members, name="broadcast_object: length")
    received = data.copy() if is_root else np.empty(int(length[0]), np.uint8)
    broadcast_in([received], root, members, name="broadcast_object")
    return obj if is_root else pickle.loads(received.tobytes())
