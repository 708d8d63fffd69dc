"""The base class of contenders, and launch functions shared by the benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.common.processes import Launch
from benchmarks.common.tools import Tools, mpich_program

Start = Callable[[Tools, int], Launch]
"""Starts a number of processes of a contender; raises Missing if a requirement is missing."""


@dataclass(frozen=True)
class Contender:
    """A compared implementation.

    Attributes:
        name: Its name in tables and on the command line.
        group: Its kind, such as "ours" or "peer".
        what: A short description for legends.
        start: Starts its processes.
    """

    name: str
    group: str
    what: str
    start: Start

    def processes(self, ranks: int) -> int:
        """The number of its processes for `ranks` ranks."""
        return ranks


def mpich(tools: Tools, ranks: int, command: Sequence[str], environment: Mapping[str, str]) -> Launch:
    """A command on all ranks under MPICH's launcher."""
    return Launch([[mpich_program(tools, "mpiexec"), "-n", str(ranks), *command]], [environment])


def unlaunched(ranks: int, command: Sequence[str], environment: Mapping[str, str]) -> Launch:
    """A command for each rank, without a launcher; BENCH_RANK and BENCH_RANKS have rank and size."""
    own = [{**environment, "BENCH_RANK": str(rank), "BENCH_RANKS": str(ranks)} for rank in range(ranks)]
    return Launch([command] * ranks, own)


def gloo(ranks: int, command: Sequence[str], environment: Mapping[str, str]) -> Launch:
    """The same for `worker.join_gloo`, over the loopback interface."""
    return unlaunched(ranks, command, {**environment, "GLOO_SOCKET_IFNAME": "lo"})
