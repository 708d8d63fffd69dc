"""The messages of a shard's slice of a chunk, by algorithm: the files of `core/src/collective/cluster/` retold. Pure.

Each is a process of a `Shard`, which says what a message, an addition and a copy take. It yields `DEPARTED` when it has
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

    CORE = 0
    FOLDS_IN = 1
    FOLDED_INTO = 2


class Shard(Protocol):
    """One shard of a host, on one channel, with a slice to average."""

    hosts: int
    role: Role
    roles: Sequence[Role]
    """Of the hosts that are simulated."""
    bytes: int
    """Of the slice."""
    width: float
    """How many times as long a part is as its result."""

    def send(self, to: Sequence[Role], stage: object, length: float, messages: int = 1, rounds: int = 1) -> Process:
        """Sends `messages` messages of `length` bytes at once, `rounds` times one after the other."""

    def receive(self, kind: Role, stage: object) -> Process:
        """Waits until they have come from a host of that kind."""

    def compute(self, length: float) -> Process:
        """Adds up or copies so many bytes."""


def piece(length: int, pieces: int) -> int:
    """The bytes of the longest of so many pieces."""
    lines = -(-length // LINE)
    return min(length, -(-lines // pieces) * LINE)


def run_algorithm(shard: Shard, algorithm: str, matched: bool) -> Process:
    """A slice by that algorithm; `matched` where all hosts are known to have called the same."""
    if algorithm in ("doubling", "halving"):
        yield from _handshake(shard, algorithm)
        return
    if not matched:
        yield from _handshake(shard, "")
    yield from (_ring if algorithm == "ring" else _pairwise)(shard)


def _handshake(shard: Shard, payload: str) -> Process:
    """Recursive doubling, with the data whole ("doubling"), in halves of halves ("halving") or without it ("")."""
    part = shard.bytes if payload else 0
    if shard.role is Role.FOLDED_INTO:
        yield from shard.send([Role.FOLDS_IN], "fold", part * shard.width)
        yield DEPARTED
        yield from shard.receive(Role.FOLDS_IN, "result")
        yield from shard.compute(part)
        return
    if shard.role is Role.FOLDS_IN:
        yield DEPARTED
        yield from shard.receive(Role.FOLDED_INTO, "fold")
        yield from shard.compute(part * shard.width)
    ranges = [part]
    for number in range(shard.hosts.bit_length() - 1):
        if payload == "halving":
            ranges.append(piece(ranges[-1], 2))
        yield from shard.send([shard.role], number, ranges[-1] * shard.width)
        if number == 0 and shard.role is Role.CORE:
            yield DEPARTED
        yield from shard.receive(shard.role, number)
        yield from shard.compute(ranges[-1] * shard.width)
    for number, sent in enumerate(reversed(ranges[1:])):
        yield from shard.send([shard.role], ("back", number), sent)
        yield from shard.receive(shard.role, ("back", number))
        yield from shard.compute(sent)
    if shard.role is Role.FOLDS_IN:
        yield from shard.send([Role.FOLDED_INTO], "result", part)


def _pairwise(shard: Shard) -> Process:
    mine, others = piece(shard.bytes, shard.hosts), shard.hosts - 1
    for stage, length in (("parts", mine * shard.width), ("results", mine)):
        yield from shard.send(shard.roles, stage, length, messages=others)
        if stage == "parts":
            yield DEPARTED
        for kind in shard.roles:
            yield from shard.receive(kind, stage)
        yield from shard.compute(others * length)


def _ring(shard: Shard) -> Process:
    """The ring. Rounds that follow each other are simulated as one, in groups; the very first is one for itself."""
    mine, left = piece(shard.bytes, shard.hosts), shard.hosts - 2
    groups = [1, *(left * (i + 1) // _GROUPS - left * i // _GROUPS for i in range(_GROUPS))]
    for way, length in (("parts", mine * shard.width), ("results", mine)):
        for number, rounds in enumerate(groups):
            if rounds:
                yield from shard.send(shard.roles, (way, number), length, rounds=rounds)
                if (way, number) == ("parts", 0):
                    yield DEPARTED
                for kind in shard.roles:
                    yield from shard.receive(kind, (way, number))
                yield from shard.compute(rounds * length)
