"""Groups of ranks, and handles on started calls.

Thread rule: any thread may use every object.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

from dl_comm import _dl_comm
from dl_comm._arrays.work import limit
from dl_comm._base.checks import checked_int, checked_ints, checked_team, checked_text, seconds
from dl_comm._base.errors import ArgumentError, StateError
from dl_comm._job import state
from dl_comm._job.state import on_end

if TYPE_CHECKING:
    import numpy as np

    from dl_comm._arrays.checkpoint import Location
    from dl_comm._base.array_types import Arrays, Object
    from dl_comm._base.table import (
        AllGather,
        Allreduce,
        AllToAll,
        Barrier,
        Broadcast,
        Gather,
        Recv,
        Reduce,
        ReduceScatter,
        Scatter,
        Send,
        SendRecv,
    )
    from dl_comm._levels.communicators import Grid


CONTROL_TEAM = -1
"""The team of broadcasts, barriers and metrics."""
_DEFAULT_TEAM = 0
"""The team whose group runs the collectives of all ranks."""


def checked_members(ranks: Any) -> list[int] | None:
    """Ranks of a group as a list; None for all."""
    return None if ranks is None else checked_ints("ranks", ranks, 0)


class Group:
    """Some ranks of the job, in an order of their own. Collective among these ranks, and only they make it.

    They may make it on any thread and at any time; members make groups with the same name and ranks in the same order.
    A group costs a few KiB until its first call, and its threads end when it has had no calls for a second. A lost rank
    ends the groups that it is a member of, and no others. As a context manager it is freed at the end.

    Args:
        ranks: Ranks of the job; rank i of the group is ``ranks[i]``. None: all ranks.
        name: Stands in error messages.
        threads: The number of its threads; None: ``DL_COMM_DEFAULT_NTHREADS``.
        timeout: The deadline of its calls in seconds, 0 for no limit; None: ``DL_COMM_TIMEOUT_S``.
        algorithm: Between hosts, a value of ``DL_COMM_ALGORITHM``; None: that of the environment.
        gpu_path: For tensors in GPU memory, a value of ``DL_COMM_GPU_PATH``; None: that of the environment. The members
            give the same threads, algorithm and path.

    Attributes:
        rank: This process's rank in the group.
        size: The number of ranks.
        ranks: The ranks of the job, by rank in the group.

    Raises:
        ArgumentError: This rank is not in ``ranks``, or an entry is no rank of the job or listed twice.
        TimeoutError: A member did not make the group before the deadline.
        StateError: ``init`` was not called, or ``finalize`` was.
    """

    def __init__(
        self,
        ranks: Sequence[int] | None = None,
        name: str = "",
        *,
        threads: int | None = None,
        timeout: float | None = None,
        algorithm: str | None = None,
        gpu_path: str | None = None,
    ) -> None:
        listed, name = checked_members(ranks), checked_text("name", name)
        count = 0 if threads is None else checked_int("threads", threads, 1)
        choices = [
            "" if choice is None else checked_text(argument, choice)
            for argument, choice in (("algorithm", algorithm), ("gpu_path", gpu_path))
        ]
        handle = _dl_comm.create_group(listed, name, count, limit(timeout), *choices)
        self._set(handle, listed, name)

    def _set(self, handle: _dl_comm.Group, ranks: list[int] | None, name: str) -> None:
        self._handle: _dl_comm.Group | None = handle
        self.rank, self.size, self._name = handle.rank(), handle.size(), name
        self.ranks = tuple(range(self.size)) if ranks is None else tuple(ranks)
        self._number = handle.number()

    @property
    def handle(self) -> _dl_comm.Group:
        """The core's group. Raises ArgumentError after ``free``."""
        if self._handle is None:
            raise ArgumentError(f"{self!r} was freed")
        return self._handle

    @property
    def number(self) -> int:
        """The number by which the ops of PyTorch and TensorFlow name the group in this process."""
        return self._number

    @property
    def local_rank(self) -> int:
        """This process's number among the ranks of the group on its host."""
        here = _hosts_of(self.ranks)
        return here[: self.rank].count(here[self.rank])

    @property
    def local_size(self) -> int:
        """The number of ranks of the group on this host."""
        here = _hosts_of(self.ranks)
        return here.count(here[self.rank])

    @property
    def hosts(self) -> int:
        """The number of hosts that have ranks of the group."""
        return len(set(_hosts_of(self.ranks)))

    def free(self) -> None:
        """Ends the group on this rank, after its started calls. A second call does nothing."""
        self._handle = None

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free()

    def __repr__(self) -> str:
        return f"<dl_comm.Group {self._name!r}: rank {self.rank} of {self.size}>"

    if TYPE_CHECKING:
        # `_api.methods` adds them: the functions of `dl_comm` with these names, which document them, on this group.
        allreduce: Allreduce
        broadcast: Broadcast
        reduce: Reduce
        all_gather: AllGather
        gather: Gather
        scatter: Scatter
        reduce_scatter: ReduceScatter
        all_to_all: AllToAll
        send: Send
        recv: Recv
        sendrecv: SendRecv
        barrier: Barrier

        def gradients(
            self, tensors: Any, *, name: str | None = None, timeout: float | None = None, out: Any = None
        ) -> Any:
            """The mean of every tensor, as in training; no schedule. As ``dl_comm.gradients``."""

        @overload
        def average(self, value: float | np.generic) -> float: ...

        @overload
        def average(self, value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]: ...

        @overload
        def average(self, value: Arrays) -> Arrays: ...

        def average(self, value: Any) -> Any:
            """The mean of a metric. As ``dl_comm.average``."""

        def average_metrics(self, metrics: Mapping[str, Any], weight: float = 1.0) -> dict[str, float]:
            """The means of named numbers. As ``dl_comm.average_metrics``."""

        def equal_on_all_ranks(self, tensors: Any) -> bool:
            """Whether arrays have the same bits on all ranks. As ``dl_comm.equal_on_all_ranks``."""

        def any_rank(self, flag: Any) -> bool:
            """Whether ``flag`` is true on any rank. As ``dl_comm.any_rank``."""

        def check_replicas(self, *objects: Any) -> None:
            """Raises MismatchError unless all ranks have the same model. As ``dl_comm.check_replicas``."""

        def random_states(self) -> list[str]:
            """The states of the random generators of all ranks. As ``dl_comm.random_states``."""

        def set_random_states(self, states: list[str]) -> None:
            """Sets the random generators of this rank. As ``dl_comm.set_random_states``."""

        def all_gather_object(self, obj: Object) -> list[Object]:
            """The picklable objects of all ranks. As ``dl_comm.all_gather_object``."""

        def gather_object(self, obj: Object, root: int = 0) -> list[Object] | None:
            """The picklable objects of all ranks, on rank ``root``; None elsewhere. As ``dl_comm.gather_object``."""

        def broadcast_object(self, obj: Object | None = None, root: int = 0) -> Object:
            """The picklable object of rank ``root``. As ``dl_comm.broadcast_object``."""

        def read_on_rank0(self, path: Location) -> bytes:
            """The content of a file that rank 0 reads. As ``dl_comm.read_on_rank0``."""

        def write_on_rank0(self, path: Location, write: Callable[[Path], Any]) -> None:
            """Writes a file on rank 0; the others wait. As ``dl_comm.write_on_rank0``."""

        def join(self, *, timeout: float | None = None) -> int:
            """For ranks with less data than others. As ``dl_comm.join``."""

        def split(self, color: int | None, key: int = 0, *, name: str = "") -> Group | None:
            """The group of the ranks with the same ``color``. As ``dl_comm.split``."""

        def grid(self, **axes: int) -> Grid:
            """A grid of the ranks with named axes. As ``dl_comm.grid``."""


@functools.lru_cache(256)
def _hosts_of(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The numbers of the hosts of these ranks of the job."""
    hosts = {each["rank"]: each["host_index"] for each in json.loads(_dl_comm.describe())["ranks"]}
    return tuple(hosts[rank] for rank in ranks)


route_changes = 0
"""How often the route has changed. Torch's compiler keeps a graph as long as this number is the same."""


def world() -> Group:
    """The group of all ranks that runs the calls without a group."""
    job = state.current
    if job.world is None:
        group = Group.__new__(Group)
        group._set(_dl_comm.group_of_team(_DEFAULT_TEAM), None, "world")
        job.world = group
    return job.world


def set_route(route: Callable[[int, str, bool], Group] | None) -> None:
    """Sets what chooses the group of a call without one: a function of its collective, device and ``async_op``."""
    global route_changes
    state.current.route = route
    route_changes += 1


def is_routed() -> bool:
    """Whether such a function is set."""
    return state.current.route is not None


def _end() -> None:
    """The next job has other hosts and another world."""
    _hosts_of.cache_clear()
    set_route(None)


on_end.append(_end)


def given(group: Group | None, collective: int = 0, *, device: str = "cpu", async_op: bool = False) -> Group:
    """The group of a call; ``collective`` is its code, 0 for none."""
    if group is None:
        route = state.current.route
        return world() if route is None else route(collective, device, async_op)
    if not isinstance(group, Group):
        raise ArgumentError(f"invalid group: {group!r} (expected a dl_comm.Group, or None for all ranks)")
    return group


def checked_place(group: Group | None, team: Any) -> int:
    """The number by which the core's averages know ``group``, or ``team`` if there is none.

    Raises ArgumentError when both are given, and those of ``checked_team`` and ``averaging_team``.
    """
    number = checked_team(team)
    if group is not None and number:
        raise ArgumentError(f"give group or team, not both (team is {number})")
    return averaging_team(group, number)


def unless_world(group: Group | None) -> Group | None:
    """None for the group of all ranks: for calls that without a group are those of all ranks, whatever the route."""
    return None if group is state.current.world else group


def is_of_all(group: Group | None) -> bool:
    """Whether a call that follows the route is one of all ranks."""
    job = state.current
    return job.route is None if group is None else group is job.world


def averaging_team(group: Group | None, team: int) -> int:
    """The number by which the core's averages know ``group``; None: that of ``team``.

    Raises ArgumentError when it is not a group; a call on one that was freed raises.
    """
    # As runtime/state.rs: below the number of the control team.
    return team if group is None or group is state.current.world else -1 - given(group).number


def join(*, group: Group | None = None, timeout: float | None = None) -> int:
    """For ranks with less data than others: contributes zeros to their calls until all ranks have joined. Collective.

    Call it after the last step. The other ranks may still call ``gradients``, ``average``, ``average_metrics`` and
    ``barrier``, use their optimizers, and make sums and means of ``allreduce``, on tensors of any framework, also on
    GPUs (through host memory then). A mean still divides by the number of ranks. Other calls of theirs raise
    MismatchError on them. Then broadcast the parameters of the rank that it returns: the others have missed steps.
    Afterwards everything goes on as before. As Horovod's ``join``.

    Args:
        group: Of the calls; None: all teams, which is what ``gradients`` and the collectives without a group use.
        timeout: In seconds; None or 0: no limit, because the other ranks may have much data. A lost rank, or one that
            ends without joining, ends the wait.

    Returns:
        The rank that joined last: it took part in all steps, so its model is complete. Of several, the last in time.

    Raises:
        MismatchError: A rank ended, or waits in a call of another group, without joining.
        StateError: A team has a schedule with non-blocking calls; or the calls without a group go to groups of the
            communicators or the selector, which must be joined by ``group``.
    """
    global joins
    if not is_routed():
        group = unless_world(group)
    if group is None and is_routed():
        raise StateError("join() joins the teams, but a communicator or the selector has other groups: give group=")
    last = _dl_comm.join(None if group is None else given(group).handle, max(seconds(timeout), 0.0))
    if group is None:
        joins += 1
    return last


joins = 0
"""How often the ranks have joined on all teams: their parameters may differ since then."""
