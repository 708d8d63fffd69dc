"""Groups of ranks, and handles on started calls.

Thread rule: any thread may use every object.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

from dl_comm import _dl_comm
from dl_comm._checks import checked_int, checked_ints, checked_team, checked_text, seconds
from dl_comm._end import on_end
from dl_comm._errors import ArgumentError, StateError
from dl_comm._work import Status, Work, limit

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from dl_comm._checkpoint import Location
    from dl_comm._communicators import Grid
    from dl_comm._types import (
        Arrays,
        Exchanged,
        Object,
        Operator,
        Options,
        Ragged,
        Scaled,
        ScaledBlocks,
        Scattered,
        Values,
    )


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
        # `_methods` adds them: the functions of `dl_comm` with these names, which document them, on this group.
        @overload
        def allreduce(
            self, x: Values, op: Operator = ..., *, async_op: Literal[False] = ..., **options: Unpack[Scaled]
        ) -> Values: ...

        @overload
        def allreduce(
            self, x: Values, op: Operator = ..., *, async_op: Literal[True], **options: Unpack[Scaled]
        ) -> Work[Values]: ...

        @overload
        def allreduce(
            self, x: Values, op: Operator = ..., *, async_op: bool = ..., **options: Unpack[Scaled]
        ) -> Values | Work[Values]: ...

        def allreduce(
            self,
            x: Any,
            op: Operator = "sum",
            *,
            name: str | None = None,
            timeout: float | None = None,
            out: Any = None,
            prescale: float = 1.0,
            postscale: float = 1.0,
            async_op: bool = False,
        ) -> Any:
            """The reduction of the arrays of all ranks, on every rank. As ``dl_comm.allreduce``."""

        @overload
        def reduce(
            self,
            x: Values,
            root: int = ...,
            op: Operator = ...,
            *,
            async_op: Literal[False] = ...,
            **options: Unpack[Options],
        ) -> Values | None: ...

        @overload
        def reduce(
            self, x: Values, root: int = ..., op: Operator = ..., *, async_op: Literal[True], **options: Unpack[Options]
        ) -> Work[Values | None]: ...

        @overload
        def reduce(
            self, x: Values, root: int = ..., op: Operator = ..., *, async_op: bool = ..., **options: Unpack[Options]
        ) -> Values | None | Work[Values | None]: ...

        def reduce(
            self,
            x: Any,
            root: int = 0,
            op: Operator = "sum",
            *,
            name: str | None = None,
            timeout: float | None = None,
            out: Any = None,
            async_op: bool = False,
        ) -> Any:
            """The reduction of the arrays of all ranks, on rank ``root``; None elsewhere. As ``dl_comm.reduce``."""

        @overload
        def all_gather(self, x: Arrays, *, async_op: Literal[False] = ..., **options: Unpack[Ragged]) -> Arrays: ...

        @overload
        def all_gather(self, x: Arrays, *, async_op: Literal[True], **options: Unpack[Ragged]) -> Work[Arrays]: ...

        @overload
        def all_gather(
            self, x: Arrays, *, async_op: bool = ..., **options: Unpack[Ragged]
        ) -> Arrays | Work[Arrays]: ...

        @overload
        def all_gather(
            self, x: complex, *, async_op: Literal[False] = ..., **options: Unpack[Ragged]
        ) -> NDArray[Any]: ...

        @overload
        def all_gather(
            self, x: complex, *, async_op: Literal[True], **options: Unpack[Ragged]
        ) -> Work[NDArray[Any]]: ...

        @overload
        def all_gather(
            self, x: complex, *, async_op: bool = ..., **options: Unpack[Ragged]
        ) -> NDArray[Any] | Work[NDArray[Any]]: ...

        def all_gather(
            self,
            x: Any,
            *,
            name: str | None = None,
            timeout: float | None = None,
            out: Any = None,
            counts: Sequence[int] | None = None,
            ragged: bool = False,
            async_op: bool = False,
        ) -> Any:
            """The arrays of all ranks, joined along the first axis. As ``dl_comm.all_gather``."""

        @overload
        def gather(
            self, x: Arrays, root: int = ..., *, async_op: Literal[False] = ..., **options: Unpack[Ragged]
        ) -> Arrays | None: ...

        @overload
        def gather(
            self, x: Arrays, root: int = ..., *, async_op: Literal[True], **options: Unpack[Ragged]
        ) -> Work[Arrays | None]: ...

        @overload
        def gather(
            self, x: Arrays, root: int = ..., *, async_op: bool = ..., **options: Unpack[Ragged]
        ) -> Arrays | None | Work[Arrays | None]: ...

        @overload
        def gather(
            self, x: complex, root: int = ..., *, async_op: Literal[False] = ..., **options: Unpack[Ragged]
        ) -> NDArray[Any] | None: ...

        @overload
        def gather(
            self, x: complex, root: int = ..., *, async_op: Literal[True], **options: Unpack[Ragged]
        ) -> Work[NDArray[Any] | None]: ...

        @overload
        def gather(
            self, x: complex, root: int = ..., *, async_op: bool = ..., **options: Unpack[Ragged]
        ) -> NDArray[Any] | None | Work[NDArray[Any] | None]: ...

        def gather(
            self,
            x: Any,
            root: int = 0,
            *,
            name: str | None = None,
            timeout: float | None = None,
            out: Any = None,
            counts: Sequence[int] | None = None,
            ragged: bool = False,
            async_op: bool = False,
        ) -> Any:
            """The arrays of all ranks, joined, on rank ``root``; None elsewhere. As ``dl_comm.gather``."""

        @overload
        def scatter(
            self, x: Any, root: int = ..., *, out: Arrays, async_op: Literal[False] = ..., **options: Unpack[Scattered]
        ) -> Arrays: ...

        @overload
        def scatter(
            self, x: Any, root: int = ..., *, out: Arrays, async_op: Literal[True], **options: Unpack[Scattered]
        ) -> Work[Arrays]: ...

        @overload
        def scatter(
            self, x: Any, root: int = ..., *, out: Arrays, async_op: bool = ..., **options: Unpack[Scattered]
        ) -> Arrays | Work[Arrays]: ...

        @overload
        def scatter(
            self,
            x: Arrays,
            root: int = ...,
            *,
            out: None = ...,
            async_op: Literal[False] = ...,
            **options: Unpack[Scattered],
        ) -> Arrays: ...

        @overload
        def scatter(
            self, x: Arrays, root: int = ..., *, out: None = ..., async_op: Literal[True], **options: Unpack[Scattered]
        ) -> Work[Arrays]: ...

        @overload
        def scatter(
            self, x: Arrays, root: int = ..., *, out: None = ..., async_op: bool = ..., **options: Unpack[Scattered]
        ) -> Arrays | Work[Arrays]: ...

        def scatter(
            self,
            x: Any,
            root: int = 0,
            *,
            out: Any = None,
            name: str | None = None,
            timeout: float | None = None,
            counts: Sequence[int] | None = None,
            async_op: bool = False,
        ) -> Any:
            """The block of this rank of the arrays of rank ``root``. As ``dl_comm.scatter``."""

        @overload
        def reduce_scatter(
            self, x: Arrays, op: Operator = ..., *, async_op: Literal[False] = ..., **options: Unpack[ScaledBlocks]
        ) -> Arrays: ...

        @overload
        def reduce_scatter(
            self, x: Arrays, op: Operator = ..., *, async_op: Literal[True], **options: Unpack[ScaledBlocks]
        ) -> Work[Arrays]: ...

        @overload
        def reduce_scatter(
            self, x: Arrays, op: Operator = ..., *, async_op: bool = ..., **options: Unpack[ScaledBlocks]
        ) -> Arrays | Work[Arrays]: ...

        def reduce_scatter(
            self,
            x: Any,
            op: Operator = "sum",
            *,
            name: str | None = None,
            timeout: float | None = None,
            out: Any = None,
            counts: Sequence[int] | None = None,
            prescale: float = 1.0,
            postscale: float = 1.0,
            async_op: bool = False,
        ) -> Any:
            """The block of this rank of the reduction. As ``dl_comm.reduce_scatter``."""

        @overload
        def all_to_all(self, x: Arrays, *, async_op: Literal[False] = ..., **options: Unpack[Exchanged]) -> Arrays: ...

        @overload
        def all_to_all(self, x: Arrays, *, async_op: Literal[True], **options: Unpack[Exchanged]) -> Work[Arrays]: ...

        @overload
        def all_to_all(
            self, x: Arrays, *, async_op: bool = ..., **options: Unpack[Exchanged]
        ) -> Arrays | Work[Arrays]: ...

        def all_to_all(
            self,
            x: Any,
            *,
            name: str | None = None,
            timeout: float | None = None,
            out: Any = None,
            send_counts: Sequence[int] | None = None,
            receive_counts: Sequence[int] | None = None,
            async_op: bool = False,
        ) -> Any:
            """The blocks that all ranks send to this one. As ``dl_comm.all_to_all``."""

        def send(
            self,
            x: Any,
            dest: int,
            tag: int = 0,
            *,
            name: str | None = None,
            timeout: float | None = None,
            async_op: bool = False,
        ) -> Any:
            """Sends arrays to rank ``dest``. As ``dl_comm.send``."""

        def recv(
            self,
            out: Any,
            source: int | None = None,
            tag: int | None = None,
            *,
            name: str | None = None,
            timeout: float | None = None,
            async_op: bool = False,
        ) -> Any:
            """Receives a message into arrays. As ``dl_comm.recv``."""

        def sendrecv(
            self,
            x: Any,
            dest: int,
            out: Any,
            source: int | None = None,
            *,
            send_tag: int = 0,
            recv_tag: int | None = None,
            name: str | None = None,
            timeout: float | None = None,
        ) -> Status:
            """Sends ``x`` and receives into ``out`` at the same time. As ``dl_comm.sendrecv``."""

        @overload
        def broadcast(
            self,
            tensors: Sequence[Object],
            root: int = ...,
            *,
            timeout: float | None = ...,
            async_op: Literal[False] = ...,
        ) -> list[Object]: ...

        @overload
        def broadcast(
            self, tensors: Sequence[Object], root: int = ..., *, timeout: float | None = ..., async_op: Literal[True]
        ) -> Work[list[Object]]: ...

        @overload
        def broadcast(
            self, tensors: Sequence[Object], root: int = ..., *, timeout: float | None = ..., async_op: bool = ...
        ) -> list[Object] | Work[list[Object]]: ...

        def broadcast(
            self, tensors: Sequence[Any], root: int = 0, *, timeout: float | None = None, async_op: bool = False
        ) -> Any:
            """The values of rank ``root``, on all ranks, in place. As ``dl_comm.broadcast``."""

        def barrier(self, *, timeout: float | None = None) -> None:
            """Returns when every rank has called it. As ``dl_comm.barrier``."""

        def gradients(
            self,
            tensors: Sequence[Any],
            *,
            name: str | None = None,
            timeout: float | None = None,
            out: Sequence[Any] | None = None,
        ) -> list[Any]:
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


_world: Group | None = None

Route = Callable[[int, str, bool], Group]
_route: Route | None = None
route_changes = 0
"""How often the route has changed. Torch's compiler keeps a graph as long as this number is the same."""


def world() -> Group:
    """The group of all ranks that runs the calls without a group."""
    global _world
    if _world is None:
        group = Group.__new__(Group)
        group._set(_dl_comm.group_of_team(_DEFAULT_TEAM), None, "world")
        _world = group
    return _world


def set_route(route: Route | None) -> None:
    """Sets what chooses the group of a call without one: a function of its collective, device and ``async_op``."""
    global _route, route_changes
    _route = route
    route_changes += 1


def is_routed() -> bool:
    """Whether such a function is set."""
    return _route is not None


def forget_world() -> None:
    """After ``finalize``: the next use finds the group of a new start."""
    global _world
    _world = None
    _hosts_of.cache_clear()
    set_route(None)


on_end.append(forget_world)


def given(group: Group | None, collective: int = 0, *, device: str = "cpu", async_op: bool = False) -> Group:
    """The group of a call; ``collective`` is its code, 0 for none."""
    if group is None:
        return world() if _route is None else _route(collective, device, async_op)
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
    return None if group is _world else group


def is_of_all(group: Group | None) -> bool:
    """Whether a call that follows the route is one of all ranks."""
    return _route is None if group is None else group is _world


def averaging_team(group: Group | None, team: int) -> int:
    """The number by which the core's averages know ``group``; None: that of ``team``.

    Raises ArgumentError when it is not a group; a call on one that was freed raises.
    """
    # As runtime/state.rs: below the number of the control team.
    return team if group is None or group is _world else -1 - given(group).number


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
        The rank that joined last: it took part in all steps, so its model is complete. Of several, the highest.

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
