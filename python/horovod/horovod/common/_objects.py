"""Broadcast and all-gather of objects, pickled by cloudpickle: unpickle only what you trust.

Thread rule: any thread; both are collective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cloudpickle

import dl_comm
from horovod.common import _job
from horovod.common.exceptions import translated
from horovod.common.process_sets import ProcessSet, place_of


class _ByCloudpickle:
    """An object that pickle leaves to cloudpickle, which takes functions and classes of scripts by value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return cloudpickle.loads, (cloudpickle.dumps(self.value),)


def broadcast_object(obj: Any, root_rank: int, process_set: ProcessSet, **unused: Any) -> Any:
    """Returns the object of one rank.

    Args:
        obj: Any object that cloudpickle takes; used on the root only.
        root_rank: The rank that has it: of the job, also in a process set.
        process_set: The ranks.
        unused: A name, and a session of TensorFlow.
    """
    group = _job.group_of(process_set.process_set_id)
    with translated():
        found = dl_comm.broadcast_object(_ByCloudpickle(obj), place_of(root_rank, process_set), group=group)
    return obj if isinstance(found, _ByCloudpickle) else found


def allgather_object(obj: Any, process_set: ProcessSet, **unused: Any) -> list[Any]:
    """Returns the objects of all ranks, in their order.

    Args:
        obj: Any object that cloudpickle takes.
        process_set: The ranks.
        unused: A name, and a session of TensorFlow.
    """
    with translated():
        group = _job.group_of(process_set.process_set_id)
        found: list[Any] = dl_comm.all_gather_object(_ByCloudpickle(obj), group=group)
    return found
