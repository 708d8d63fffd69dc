"""What all contenders have in common, and the launches of more than one benchmark."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.common.processes import Launch
from benchmarks.common.tools import Tools, mpich_program

Start = Callable[[Tools, int], Launch]
"""How to start so many processes of a contender; raises Missing when something is not there."""


@dataclass(frozen=True)
class Contender:
    """One of those that are compared.

    Attributes:
        name: Its name in tables and on the command line.
        group: What kind of contender it is, such as "ours" or "peer".
        what: A few words for legends.
        start: How its processes are started.
    """

    name: str
    group: str
    what: str
    start: Start

    def processes(self, ranks: int) -> int:
        """The number of its processes in a case of so many ranks."""
        return ranks


def mpich(tools: Tools, ranks: int, command: Sequence[str], environment: Mapping[str, str]) -> Launch:
    """A command on all ranks under the MPICH's launcher."""
    return Launch([[mpich_program(tools, "mpiexec"), "-n", str(ranks), *command]], [environment])


def unlaunched(ranks: int, command: Sequence[str], environment: Mapping[str, str]) -> Launch:
    """A command for each rank, without a launcher: BENCH_RANK and BENCH_RANKS tell the processes who they are."""
    own = [{**environment, "BENCH_RANK": str(rank), "BENCH_RANKS": str(ranks)} for rank in range(ranks)]
    return Launch([command] * ranks, own)


def gloo(ranks: int, command: Sequence[str], environment: Mapping[str, str]) -> Launch:
    """The same for processes that `worker.join_gloo` joins, over the loopback interface."""
    return unlaunched(ranks, command, {**environment, "GLOO_SOCKET_IFNAME": "lo"})
