"""The flags of a round on a host of many ranks: cache lines and time, flat and in a tree. Pure.

Follows `core/src/transport/flag_tree.rs`. A rank reads lines that other ranks have written: each takes the latency
between the two processors, and a few are under way at a time. The latencies are those of two EPYC 9274F with 24
processors each, as their owners have measured them (issue 132 of the program core-to-core-latency): within a level-3
cache, within a socket, between sockets. Ranks share a cache by eights, and the host has two sockets.
"""

from __future__ import annotations

from dataclasses import dataclass

FAN_OUT = 8
"""The ranks that gather each other's flags in a level of the tree."""
FLAT_RANKS = 15
"""The most ranks of a host that read each other's flags (`notices.flat`)."""
RANKS = (8, 15, 16, 32, 64, 128)

_CACHE_S, _SOCKET_S, _HOST_S = 23e-9, 100e-9, 195e-9
_IN_FLIGHT = 4
"""Lines that a processor waits for at the same time, without a prefetcher."""


@dataclass(frozen=True)
class Notice:
    """A flag of every rank, for which every rank waits: lines that all ranks read together, and seconds."""

    lines: int
    seconds: float


def flat(ranks: int) -> Notice:
    """Each rank reads the flags of all others."""
    return Notice(ranks * (ranks - 1), max(_read(me, range(ranks), ranks) for me in range(ranks)))


def in_tree(ranks: int) -> Notice:
    """Flags are gathered up the tree and released down it."""
    gathered: dict[int, float] = {}
    for rank in reversed(range(ranks)):
        below = [child for child in range(rank + 1, ranks) if parent(child) == rank]
        gathered[rank] = max((gathered[child] for child in below), default=0.0) + _read(rank, below, ranks)
    released = {0: gathered[0]}
    for rank in range(1, ranks):
        above = parent(rank)
        released[rank] = released[above] + _latency(rank, above, ranks)
    return Notice(2 * (ranks - 1), max(released.values()))


def parent(rank: int) -> int:
    """The number without its last digit, in base `FAN_OUT`, that is not 0; for every rank but the first."""
    unit = 1
    while rank % (unit * FAN_OUT) == 0:
        unit *= FAN_OUT
    return rank - rank // unit % FAN_OUT * unit


def table() -> str:
    """The lines and times by the number of ranks."""
    rows = ["| ranks | lines, flat | in a tree | ns, flat | in a tree |", "|---|---|---|---|---|"]
    for ranks in RANKS:
        each, tree = flat(ranks), in_tree(ranks)
        rows.append(
            f"| {ranks} | {each.lines:,} | {tree.lines} | {each.seconds * 1e9:,.0f} | {tree.seconds * 1e9:,.0f} |"
        )
    return "\n".join(rows)


def _read(me: int, others: range | list[int], ranks: int) -> float:
    latencies = [_latency(me, other, ranks) for other in others if other != me]
    return max(sum(latencies) / _IN_FLIGHT, max(latencies, default=0.0))


def _latency(one: int, other: int, ranks: int) -> float:
    if one // FAN_OUT == other // FAN_OUT:
        return _CACHE_S
    sockets = ranks > FLAT_RANKS
    return _HOST_S if sockets and (one < ranks // 2) != (other < ranks // 2) else _SOCKET_S
