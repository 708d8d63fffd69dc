"""The messages of one shard of a chunk for each algorithm, as in `core/src/collective/inter_host/`. Pure.

Each algorithm is a process of a `Shard`, which simulates messages, additions and copies.

Hosts with the same role are simulated once, as one host that sends to itself. If the number of hosts is a power of two,
all have the same role. Otherwise some hosts fold their data into others; hosts that do neither wait for the latter and
are not simulated. For few chunks on few hosts this makes doubling and halving up to a sixth too slow, because the first
message of an omitted host would come earlier. If the pieces of hosts differ by a line of 64 bytes, the longest counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from benchmarks.simulate.events import Process

LINE = 64
"""Pieces begin at multiples of this many bytes."""
_GROUPS = 32


class Role(Enum):
    """The role of a host outside the rounds, as in `inter_host/tree.rs`."""

    CORE = 0
    FOLDS_IN = 1
    FOLDED_INTO = 2


class Shard(Protocol):
    """One shard of a chunk, on one channel of a host."""

    hosts: int
    role: Role
    roles: Sequence[Role]
    """The roles of the simulated hosts."""
    bytes: int
    """The bytes of the shard."""
    width: float
    """Size of a partial sum relative to its result."""
    is_only: bool
    """Whether the host has one rank, which sends elements instead of partial sums in a pairwise exchange."""

    def send(self, to: Sequence[Role], stage: object, length: float, messages: int = 1, rounds: int = 1) -> Process:
        """Sends `messages` concurrent messages of `length` bytes, in `rounds` consecutive rounds."""

    def receive(self, kind: Role, stage: object) -> Process:
        """Waits for the messages of a host of that role."""

    def compute(self, length: float) -> Process:
        """Adds or copies `length` bytes."""


def piece(length: int, pieces: int) -> int:
    """The bytes of the longest of `pieces` pieces."""
    lines = -(-length // LINE)
    return min(length, -(-lines // pieces) * LINE)


def run_algorithm(shard: Shard, algorithm: str, matched: bool) -> Process:
    """Reduces a shard with an algorithm; `matched`: the calls of all hosts are known to match."""
    if algorithm in ("doubling", "halving"):
        yield from _handshake(shard, algorithm)
        return
    if not matched:
        yield from _handshake(shard, "")
    yield from (_ring if algorithm == "ring" else _pairwise)(shard)


def _handshake(shard: Shard, payload: str) -> Process:
    """Recursive doubling with the whole data ("doubling"), halved in each round ("halving"), or without data ("")."""
    part = shard.bytes if payload else 0
    if shard.role is Role.FOLDED_INTO:
        yield from shard.send([Role.FOLDS_IN], "fold", part * shard.width)
        yield from shard.receive(Role.FOLDS_IN, "result")
        yield from shard.compute(part)
        return
    if shard.role is Role.FOLDS_IN:
        yield from shard.receive(Role.FOLDED_INTO, "fold")
        yield from shard.compute(part * shard.width)
    ranges = [part]
    for number in range(shard.hosts.bit_length() - 1):
        if payload == "halving":
            ranges.append(piece(ranges[-1], 2))
        yield from shard.send([shard.role], number, ranges[-1] * shard.width)
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
    for stage, length in (("parts", mine * (1 if shard.is_only else shard.width)), ("results", mine)):
        yield from shard.send(shard.roles, stage, length, messages=others)
        for kind in shard.roles:
            yield from shard.receive(kind, stage)
        yield from shard.compute(others * length)


def _ring(shard: Shard) -> Process:
    """The ring. Consecutive rounds are simulated in groups; the first round is separate."""
    mine, left = piece(shard.bytes, shard.hosts), shard.hosts - 2
    groups = [1, *(left * (i + 1) // _GROUPS - left * i // _GROUPS for i in range(_GROUPS))]
    for phase, length in (("parts", mine * shard.width), ("results", mine)):
        for number, rounds in enumerate(groups):
            if rounds:
                yield from shard.send(shard.roles, (phase, number), length, rounds=rounds)
                for kind in shard.roles:
                    yield from shard.receive(kind, (phase, number))
                yield from shard.compute(rounds * length)
