"""The messages of a lane's slice of a chunk, by algorithm: the files of `core/src/collective/cluster/` retold. Pure.

Each is a process of a `Lane`, which says what a message, an addition and a copy take. It yields `DEPARTED` when it has
sent what it sends before anything comes: until there it is `start` of `cluster/mod.rs`, from there on `finish`.

Hosts that do the same at the same time are simulated once, as one that sends to itself. Of a number of hosts that is a
power of two all do. Of another one, some give their part to a neighbour, and those take it; a third kind of host, which
does neither, waits for those that take, and is left out: of few chunks on few hosts that makes doubling and halving up
to a sixth slower than they are, since such a host's first message comes before that of a host that takes. Where hosts'
pieces differ by a line of 64 bytes, the longest counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from benchmarks.simulate.events import Process

LINE = 64
"""Every cut is at a multiple of this many bytes."""
DEPARTED = object()
"""Yielded where the first messages have been sent."""
_GROUPS = 32


class Role(Enum):
    """What a host does beside the rounds, as in `cluster/tree.rs`."""

    PLAIN = 0
    TAKES = 1
    GIVES_WAY = 2


class Lane(Protocol):
    """One lane of a host, on one channel, with a slice to average."""

    hosts: int
    role: Role
    kinds: Sequence[Role]
    """Of the hosts that are simulated."""
    bytes: int
    """Of the slice."""
    width: float
    """How many times as long a part is as its result."""

    def send(self, to: Sequence[Role], stage: object, length: float, messages: int = 1, rounds: int = 1) -> Process:
        """Sends `messages` messages of `length` bytes at once, `rounds` times one after the other."""

    def receive(self, kind: Role, stage: object) -> Process:
        """Waits until they have come from a host of that kind."""

    def touch(self, length: float) -> Process:
        """Adds up or copies so many bytes."""


def piece(length: int, pieces: int) -> int:
    """The bytes of the longest of so many pieces."""
    lines = -(-length // LINE)
    return min(length, -(-lines // pieces) * LINE)


def carry_out(lane: Lane, algorithm: str, matched: bool) -> Process:
    """A slice by that algorithm; `matched` where all hosts are known to have called the same."""
    if algorithm in ("doubling", "halving"):
        yield from _meeting(lane, algorithm)
        return
    if not matched:
        yield from _meeting(lane, "")
    yield from (_ring if algorithm == "ring" else _pairwise)(lane)


def _meeting(lane: Lane, freight: str) -> Process:
    """Recursive doubling, with the data whole ("doubling"), in halves of halves ("halving") or without it ("")."""
    part = lane.bytes if freight else 0
    if lane.role is Role.GIVES_WAY:
        yield from lane.send([Role.TAKES], "given", part * lane.width)
        yield DEPARTED
        yield from lane.receive(Role.TAKES, "result")
        yield from lane.touch(part)
        return
    if lane.role is Role.TAKES:
        yield DEPARTED
        yield from lane.receive(Role.GIVES_WAY, "given")
        yield from lane.touch(part * lane.width)
    ranges = [part]
    for number in range(lane.hosts.bit_length() - 1):
        if freight == "halving":
            ranges.append(piece(ranges[-1], 2))
        yield from lane.send([lane.role], number, ranges[-1] * lane.width)
        if number == 0 and lane.role is Role.PLAIN:
            yield DEPARTED
        yield from lane.receive(lane.role, number)
        yield from lane.touch(ranges[-1] * lane.width)
    for number, sent in enumerate(reversed(ranges[1:])):
        yield from lane.send([lane.role], ("back", number), sent)
        yield from lane.receive(lane.role, ("back", number))
        yield from lane.touch(sent)
    if lane.role is Role.TAKES:
        yield from lane.send([Role.GIVES_WAY], "result", part)


def _pairwise(lane: Lane) -> Process:
    mine, others = piece(lane.bytes, lane.hosts), lane.hosts - 1
    for stage, length in (("parts", mine * lane.width), ("results", mine)):
        yield from lane.send(lane.kinds, stage, length, messages=others)
        if stage == "parts":
            yield DEPARTED
        for kind in lane.kinds:
            yield from lane.receive(kind, stage)
        yield from lane.touch(others * length)


def _ring(lane: Lane) -> Process:
    """The ring. Rounds that follow each other are simulated as one, in groups; the very first is one for itself."""
    mine, left = piece(lane.bytes, lane.hosts), lane.hosts - 2
    groups = [1, *(left * (i + 1) // _GROUPS - left * i // _GROUPS for i in range(_GROUPS))]
    for way, length in (("parts", mine * lane.width), ("results", mine)):
        for number, rounds in enumerate(groups):
            if rounds:
                yield from lane.send(lane.kinds, (way, number), length, rounds=rounds)
                if (way, number) == ("parts", 0):
                    yield DEPARTED
                for kind in lane.kinds:
                    yield from lane.receive(kind, (way, number))
                yield from lane.touch(rounds * length)
