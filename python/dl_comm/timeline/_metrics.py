"""Metrics of a timeline: steps, exposed communication, waits by rank, sizes and bandwidth.

Processes the files event by event; memory grows with the calls and steps of the job, not with the spans of its threads.
Times are seconds unless a name says otherwise.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dl_comm.timeline._files import Event

OTHERS = -1  # the control team: broadcasts, barriers, metrics
GROUP = "dl_comm_group"
"""The name of the events that label groups."""


@dataclass(frozen=True)
class GroupLabel:
    """What the files say of a group with a name: ``members`` are ranks of the job, ``hosts`` the first of each host."""

    name: str
    members: tuple[int, ...]
    hosts: tuple[int, ...]

    @staticmethod
    def of(args: Mapping[str, Any]) -> GroupLabel:
        """The label in an event."""
        return GroupLabel(str(args["name"]), tuple(map(int, args["members"])), tuple(map(int, args["hosts"])))

    def target(self, target: str) -> str:
        """The target of a wait, ``rank N`` or ``host N`` of the group, in the job."""
        kind, number = target.split()
        if kind == "rank":
            return f"rank {self.members[int(number)]}"
        return f"host of rank {self.hosts[int(number)]}"


@dataclass
class SizeClass:
    """Calls of 2 ** (exponent - 1) (exclusive) to 2 ** exponent bytes, summed over ranks."""

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0
    best: float = 0.0

    def add(self, size: int, seconds: float) -> None:
        """Adds a call that took ``seconds`` from its start."""
        self.calls += 1
        self.bytes += size
        self.seconds += seconds
        if seconds > 0:
            self.best = max(self.best, size / seconds)

    @property
    def rate(self) -> float:
        """Bytes a second of a rank."""
        return self.bytes / self.seconds if self.seconds else 0.0


@dataclass
class CallArrivals:
    """Arrivals of the ranks at a call: their number, the first and last two times, and the last rank."""

    ranks: int = 0
    first: float = float("inf")
    before: float = float("-inf")
    last: float = float("-inf")
    rank: int = -1

    def add(self, rank: int, moment: float) -> None:
        """Adds the arrival of a rank."""
        self.ranks += 1
        self.first = min(self.first, moment)
        if moment > self.last:
            self.before, self.last, self.rank = self.last, moment, rank
        else:
            self.before = max(self.before, moment)


@dataclass
class TeamMetrics:
    """Metrics of a team; lists and sums by rank."""

    calls: int = 0
    failed: int = 0
    bytes: int = 0
    comm: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    exposed: dict[int, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    steps: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    waits: dict[tuple[int, str], float] = field(default_factory=lambda: defaultdict(float))
    sizes: dict[int, SizeClass] = field(default_factory=lambda: defaultdict(SizeClass))
    arrivals: dict[int, CallArrivals] = field(default_factory=lambda: defaultdict(CallArrivals))

    def step_times(self, rank: int) -> list[float]:
        """The times between the steps of a rank."""
        steps = sorted(self.steps.get(rank, ()))
        return [after - before for before, after in zip(steps, steps[1:], strict=False)]

    def step_exposed(self, rank: int) -> list[float]:
        """Seconds that the callers of a rank waited in each step; a wait counts where it ends."""
        steps = sorted(self.steps.get(rank, ()))
        out = [0.0] * max(len(steps) - 1, 0)
        for end, seconds in self.exposed.get(rank, ()):
            step = bisect_left(steps, end) - 1
            if 0 <= step < len(out):
                out[step] += seconds
        return out

    @property
    def overlap(self) -> float:
        """The share of the communication time that is not exposed."""
        comm = sum(self.comm.values())
        exposed = sum(seconds for waits in self.exposed.values() for _, seconds in waits)
        return min(max(1 - exposed / comm, 0.0), 1.0) if comm else 0.0


def exponent(size: int) -> int:
    """The size class of ``size`` bytes: the smallest e with size <= 2 ** e; -1 for 0 bytes."""
    return (size - 1).bit_length() if size else -1


class TraceMetrics:
    """All metrics by team; add the events of each rank with :meth:`add`."""

    def __init__(self) -> None:
        self.teams: dict[int, TeamMetrics] = defaultdict(TeamMetrics)
        self.titles: dict[int, str] = {}
        self.groups: dict[int, GroupLabel] = {}
        self.ranges: dict[int, tuple[float, float]] = {}
        self._starts: dict[tuple[int, int, int], float] = {}

    def add(self, event: Event) -> None:
        """Adds an event; the events of a rank come in file order."""
        rank = event["pid"]
        if event["ph"] == "M":
            if event["name"] == "process_name":
                self.titles[rank] = str(event["args"]["name"])
            elif event["name"] == GROUP:
                self.groups[int(event["args"]["number"])] = GroupLabel.of(event["args"])
            return
        begin, duration = event["ts"] * 1e-6, event["dur"] * 1e-6
        end, args = begin + duration, event["args"]
        low, high = self.ranges.get(rank, (begin, end))
        self.ranges[rank] = (min(low, begin), max(high, end))
        number = int(args.get("team", OTHERS))
        team = self.teams[number]
        match event["cat"]:
            case "phase" if event["name"] == "queue":
                self._starts[rank, number, args["call"]] = end
            case "call":
                self._call(team, rank, event, self._starts.pop((rank, number, args["call"]), begin), end)
            case "wait_for_rank":
                target = str(args["target"])
                label = self.groups.get(number)
                team.waits[rank, target if label is None else label.target(target)] += duration
            case "exposed":
                team.exposed[rank].append((end, duration))
            case "step":
                team.steps[rank].append(begin)

    @staticmethod
    def _call(team: TeamMetrics, rank: int, event: Event, start: float, end: float) -> None:
        args, size = event["args"], int(event["args"]["bytes"])
        team.calls += 1
        team.bytes += size
        team.comm[rank] += end - start
        if args.get("error"):
            team.failed += 1
            return
        team.sizes[exponent(size)].add(size, end - start)
        if args.get("matched"):
            team.arrivals[int(args["matched"])].add(rank, start)

    def ranks_of(self, number: int) -> list[int]:
        """The ranks of a team or group that have a file."""
        label = self.groups.get(number)
        return self.ranks if label is None else [rank for rank in self.ranks if rank in label.members]

    @property
    def ranks(self) -> list[int]:
        """The ranks with a file."""
        return sorted({*self.titles, *self.ranges})

    @property
    def first(self) -> float:
        """The time of the first event, in microseconds."""
        return min((low for low, _ in self.ranges.values()), default=0.0) * 1e6
