"""The job of this process: its start and end, its ranks, and the groups of its process sets.

Thread rule: ``start``, ``stop``, ``add`` and ``remove`` are collective, in the same order on all ranks; any thread may
call the others.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

import dl_comm
from horovod.common import _environment, _timeline
from horovod.common.exceptions import NOT_INITIALIZED, HorovodInternalError, translated


class Job:
    """What ``shutdown`` ends.

    Attributes:
        world: The group of all ranks of Horovod.
        sets: The ranks of each process set, by its id.
        groups: The groups of those that this rank is in.
        launcher: What started the ranks, as in ``dl_comm.topology()``.
    """

    def __init__(self, world: dl_comm.Group) -> None:
        self.world = world
        self.rank, self.size = world.rank, world.size
        self.sets: dict[int, list[int]] = {0: list(range(world.size))}
        self.groups: dict[int, dl_comm.Group] = {0: world}
        self.next_set = 1
        self.launcher = str(dl_comm.topology()["launcher"])
        known = dl_comm.topology()["ranks"]
        ranks = [known[rank] for rank in world.ranks]
        mine = ranks[world.rank]
        by_host: dict[str, list[int]] = {}
        for place, each in enumerate(ranks):
            by_host.setdefault(each["host"], []).append(place)
        here = by_host[mine["host"]]
        local = here.index(world.rank)
        # As Horovod: the hosts that have a rank of this local number.
        column = [host for host, places in by_host.items() if len(places) > local]
        self.is_homogeneous = len({len(places) for places in by_host.values()}) == 1
        self.local_rank = _given("LOCAL_RANK", local)
        self.local_size = _given("LOCAL_SIZE", len(here))
        self.cross_rank = _given("CROSS_RANK", column.index(mine["host"]))
        self.cross_size = _given("CROSS_SIZE", len(column))


def _given(name: str, found: int) -> int:
    """A number of the launcher's variables, which count if they made this process a rank."""
    given = _environment.number(f"HOROVOD_{name}") if "HOROVOD_RANK" in os.environ else None
    return found if given is None else given


_RESTART_S = 10.0
_lock = threading.RLock()
_has_ended = False  # a job of this process
_job: Job | None = None


on_start: list[Callable[[], None]] = []
"""Called when a job starts."""


def current() -> Job:
    """The job. Raises ValueError before ``init`` and after ``shutdown``."""
    if _job is None:
        raise ValueError(NOT_INITIALIZED)
    return _job


def is_started() -> bool:
    """Whether there is a job."""
    return _job is not None


def group_of(number: int | None) -> dl_comm.Group:
    """The group of a process set. Raises ValueError if there is no such set, or this rank is not in it."""
    job = _job
    if job is None:
        raise ValueError(NOT_INITIALIZED)
    found = job.groups.get(number)  # type: ignore[arg-type]
    if found is None:
        if number in job.sets:
            raise ValueError(f"rank {job.rank} is not in process set {number}, which has the ranks {job.sets[number]}")
        raise ValueError("Process set does not exist or has not been registered.")
    return found


def start(ranks: Sequence[int] | None) -> None:
    """Starts the job of these ranks of the launcher; None: all. Does nothing if there is one. Collective."""
    global _job
    with _lock:
        if _job is not None:
            return
        _environment.apply()
        with translated():
            _start_ranks()
            job = Job(dl_comm.world() if ranks is None else dl_comm.Group(ranks, "horovod"))
        for forget in on_start:
            forget()
        _job = job
        _timeline.start_by_environment(_job.rank)


def _start_ranks() -> None:
    rank, size = _environment.number("HOROVOD_RANK"), _environment.number("HOROVOD_SIZE")
    if dl_comm.is_initialized() or rank is None or size is None:
        return dl_comm.init()
    host, port = (os.environ.get(f"HOROVOD_GLOO_RENDEZVOUS_{name}") for name in ("ADDR", "PORT"))
    if size > 1 and not (host and port):
        raise ValueError(
            "HOROVOD_RANK and HOROVOD_SIZE are set: set HOROVOD_GLOO_RENDEZVOUS_ADDR and HOROVOD_GLOO_RENDEZVOUS_PORT, "
            "the host of rank 0 and a free port there, too, or none of them"
        )
    address = f"{host}:{port}" if size > 1 else None
    key = os.environ.get("HOROVOD_SECRET_KEY")
    until = time.monotonic() + _RESTART_S
    while True:
        try:
            return dl_comm.init(rank=rank, size=size, address=address, key=key)
        except (dl_comm.ArgumentError, dl_comm.StateError, dl_comm.TimeoutError):
            raise
        except dl_comm.CommError:
            # After a shutdown, rank 0 may still be closing the store of the job before at this address.
            if not _has_ended or time.monotonic() > until:
                raise
            time.sleep(0.02)


def stop() -> None:
    """Ends the job. Does nothing without one. Collective."""
    global _job, _has_ended
    with _lock:
        if _job is None:
            return
        _timeline.stop()
        _job, _has_ended = None, True
        with translated():
            dl_comm.finalize()
        _environment.forget()


def add(given: Sequence[tuple[bool, list[int]]]) -> dict[tuple[int, ...], int]:
    """Adds the process sets that do not exist; returns the new ones with their ids. Collective over all ranks.

    Args:
        given: For each, whether it is that of an MPI communicator, and its ranks. Communicators may differ between
            ranks, such as those of a split.

    Raises:
        HorovodInternalError: The ranks give other sets.
        ValueError: A set has a number that is no rank.
    """
    with _lock, translated():
        job = current()
        of_all: list[list[tuple[bool, list[int]]]] = dl_comm.all_gather_object(list(given), group=job.world)
        if any(
            [entry for entry in one if not entry[0]] != [entry for entry in of_all[0] if not entry[0]] for one in of_all
        ):
            raise HorovodInternalError(
                f"the ranks add different process sets: {[[e[1] for e in one] for one in of_all]}"
            )
        known = {tuple(ranks) for ranks in job.sets.values()}
        # In the order of the list, and of the ranks.
        listed = dict.fromkeys(tuple(entry[1]) for entries in zip(*of_all, strict=True) for entry in entries)
        for ranks in listed:
            if not ranks or len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(job.size)):
                raise ValueError(
                    f"invalid ranks of a process set: {[*ranks]} (expected different ones from 0 to {job.size - 1})"
                )
        added = {ranks: job.next_set + i for i, ranks in enumerate(each for each in listed if each not in known)}
        for ranks, number in added.items():
            if job.rank in ranks:
                job.groups[number] = dl_comm.Group([job.world.ranks[rank] for rank in ranks], f"process set {number}")
            job.sets[number] = list(ranks)
        job.next_set += len(added)
        return added


def remove(number: int) -> bool:
    """Removes a process set; returns whether there was one. Collective over all ranks.

    Raises HorovodInternalError if the ranks remove different ones.
    """
    with _lock, translated():
        job = current()
        of_all = dl_comm.all_gather_object(job.sets.get(number), group=job.world)
        if any(each != of_all[0] for each in of_all):
            raise HorovodInternalError(f"the ranks remove different process sets: {of_all}")
        if number == 0 or number not in job.sets:
            return False
        del job.sets[number]
        group = job.groups.pop(number, None)
        if group is not None:
            group.free()
        return True
