"""Process sets: some ranks that make collectives of their own.

    even = hvd.add_process_set([0, 2])  # all ranks; with init(process_sets="dynamic")
    if even.included():
        hvd.allreduce(tensor, process_set=even)

Thread rule: ``add_process_set`` and ``remove_process_set`` are collective over all ranks; any thread may do the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from horovod.common import _environment, _job


class ProcessSet:
    """Some ranks of the job, in ascending order.

    Args:
        ranks_or_comm: Ranks, or an mpi4py communicator of them.

    Attributes:
        process_set_id: The number of the set; None before ``init(process_sets=...)`` or ``add_process_set``, and after
            ``remove_process_set``.
        ranks: The ranks; None for a communicator before ``init``.
        mpi_comm: The communicator, or None.

    Raises:
        ValueError: It is neither.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        if isinstance(ranks_or_comm, Iterable):
            ranks = list(ranks_or_comm)
            if not all(isinstance(rank, int) for rank in ranks):
                raise ValueError(f"a ProcessSet takes ranks, or an mpi4py communicator, not {ranks}")
            self.ranks = sorted(ranks)
        elif hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = ranks_or_comm
        else:
            raise ValueError(f"a ProcessSet takes ranks, or an mpi4py communicator, not {ranks_or_comm!r}")

    def size(self) -> int | None:
        """The number of ranks; None if the set is not registered."""
        return None if self.process_set_id is None else size_of(self.process_set_id)

    def rank(self) -> int | None:
        """This process's number in the set; None if the set is not registered. Roots are ranks of the job instead.

        Raises ValueError if this process is not in the set.
        """
        return None if self.process_set_id is None else rank_in(self.process_set_id)

    def included(self) -> bool | None:
        """Whether this process is in the set; None if its ranks are not known."""
        return None if self.ranks is None else _job.current().rank in self.ranks

    def _invalidate(self) -> None:
        self.process_set_id = None

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    __repr__ = __str__


global_process_set = ProcessSet([])
"""All ranks."""
global_process_set.process_set_id = 0


def size_of(number: int | None) -> int:
    """The number of ranks of a registered set. Raises ValueError if there is none of this number."""
    sets = _job.current().sets
    if number not in sets:
        raise ValueError("Process set does not exist or has not been registered.")
    return len(sets[number])


def rank_in(number: int) -> int:
    """This process's number in a registered set. Raises ValueError if it is not in the set."""
    return int(_job.group_of(number).rank)


def place_of(root_rank: int, process_set: ProcessSet) -> int:
    """The place of a rank of the job in a set. Raises ValueError if it is not in the set."""
    ranks = process_set.ranks or []
    if root_rank not in ranks:
        raise ValueError(f"root_rank is {root_rank}, which is not in the process set of the ranks {ranks}")
    return ranks.index(root_rank)


def ranks_of(comm: Any) -> list[int]:
    """The ranks of MPI's world in an mpi4py communicator. Raises ValueError if it is none."""
    if not hasattr(comm, "Get_group"):
        raise ValueError(f"expected a list of ranks or an mpi4py communicator, not {comm!r}")
    from mpi4py import MPI

    group = comm.Get_group()
    return list(MPI.Group.Translate_ranks(group, list(range(group.size)), MPI.COMM_WORLD.Get_group()))


def register(process_sets: Sequence[ProcessSet]) -> None:
    """Registers the sets of ``init``. Collective.

    Raises ValueError, on every rank, if two have the same ranks, or one has all; the others are registered then.
    """
    for each in process_sets:
        if each.ranks is None:
            each.ranks = sorted(ranks_of(each.mpi_comm))
    if process_sets:
        _job.add([(each.mpi_comm is not None, each.ranks or []) for each in process_sets])
    numbers = {tuple(ranks): number for number, ranks in _job.current().sets.items()}
    global_process_set.ranks = list(_job.current().sets[0])
    seen = {0}
    for place, each in enumerate(process_sets):
        number = numbers[tuple(each.ranks or ())]
        each.process_set_id = None if number in seen else number
        if number in seen:
            raise ValueError(f"entry {place} of process_sets is a duplicate: {each}")
        seen.add(number)


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Adds a process set after ``init``. Collective over all ranks, also those outside of the set.

    Args:
        process_set: The set, or its ranks.

    Returns:
        The set, registered.

    Raises:
        ValueError: There is a set of these ranks, ``HOROVOD_DYNAMIC_PROCESS_SETS`` is not 1, or before ``init``.
        HorovodInternalError: The ranks add different ones.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if added.ranks is None:
        raise NotImplementedError("add_process_set takes ranks; give a communicator to init(process_sets=...)")
    _require_dynamic()
    number = _job.add([(False, added.ranks)]).get(tuple(added.ranks))
    if number is None:
        raise ValueError(f"there is a process set of these ranks already: {added}")
    added.process_set_id = number
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a process set; returns whether it was registered. Collective over all ranks.

    The set of all ranks is never removed. Raises as ``add_process_set``.
    """
    number = process_set.process_set_id
    if not number:
        return False
    _require_dynamic()
    process_set._invalidate()
    return _job.remove(number)


def _require_dynamic() -> None:
    _job.current()
    if not _environment.flag("HOROVOD_DYNAMIC_PROCESS_SETS"):
        raise ValueError(
            "Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow adding and removing process sets after Horovod initialization."
        )
