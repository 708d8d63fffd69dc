"""Soak test: random sizes, types, teams and orders on every rank; checks values and memory growth.

``python tests/launch.py 3 1400 python tests/soak.py --minutes 20``. Ends with a line of figures on rank 0, or an error.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import dl_comm as mc

TEAMS = 3
DTYPES = [np.float16, np.float32, np.float64, np.int32, np.int64]
WARM = 0.25
"""Memory must not grow after this share of the time; before, thread allocators fill their caches."""


@dataclass(frozen=True)
class Call:
    """A call of all ranks: an average on a team, or a broadcast from a rank."""

    name: str
    team: int
    root: int | None
    tensors: list[tuple[type, int]]

    def carry_out(self, seed: int, failures: list[str]) -> None:
        """Makes the call, and checks the values."""
        rank, size = mc.get_rank(), mc.get_nranks()
        # Small multiples of the number of ranks: means are integers, exact in every type.
        each = [[(np.arange(n) + r + seed) % 7 * size for r in range(size)] for _, n in self.tensors]
        mine = [values[rank].astype(dtype) for (dtype, _), values in zip(self.tensors, each, strict=True)]
        if self.root is None:
            found = mc.gradients(mine, self.team, name=self.name)
            right = [sum(values) // size for values in each]
        else:
            found = mc.broadcast(mine, self.root)
            right = [values[self.root] for values in each]
        for (dtype, length), have, want in zip(self.tensors, found, right, strict=True):
            if have.dtype != dtype or not np.array_equal(have.astype(np.int64), want):
                failures.append(f"call {self.name} of round {seed}: {dtype.__name__}[{length}]")


def plan(seed: int) -> list[Call]:
    """The calls of a round, equal on all ranks."""
    draw = random.Random(seed)
    calls = []
    for number in range(draw.randint(1, 6)):
        tensors = [(draw.choice(DTYPES), int(2 ** draw.uniform(0, 17))) for _ in range(draw.randint(1, 8))]
        root = draw.randrange(mc.get_nranks()) if draw.random() < 0.2 else None
        calls.append(Call(str(number), draw.randrange(TEAMS), root, tensors))
    return calls


def round_of(seed: int, threads: Executor) -> None:
    """Runs a round: one thread for each average, started in a different order on each rank."""
    calls = plan(seed)
    failures: list[str] = []
    averages = [call for call in calls if call.root is None]
    random.Random(seed + 7919 * mc.get_rank()).shuffle(averages)
    started = [threads.submit(call.carry_out, seed, failures) for call in averages]
    # Broadcasts have no names, so their order is fixed.
    for call in calls:
        if call.root is not None:
            call.carry_out(seed, failures)
    for call in started:
        call.result()
    if failures:
        raise AssertionError(failures)


def resident() -> float:
    """Resident memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    """Runs until rank 0's clock reaches the limit."""
    parser = argparse.ArgumentParser(description="Random calls for some minutes, values and memory checked.")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    mc.init(nthread_per_team=2, nteams=TEAMS)
    rank = mc.get_rank()
    (seed,) = (int(value) for value in mc.broadcast([np.array([arguments.seed])])[0])
    start = shown = time.monotonic()
    rounds, warm = 0, 0.0
    # Reuse one thread for each call of a round: Python leaks a little memory for every ended thread.
    threads = ThreadPoolExecutor(6)
    while mc.broadcast([np.array([time.monotonic() - start < arguments.minutes * 60])])[0][0]:
        round_of(seed + rounds, threads)
        rounds += 1
        if not warm and time.monotonic() - start > WARM * arguments.minutes * 60:
            warm = resident()
        if rank == 0 and time.monotonic() - shown > 30:
            shown = time.monotonic()
            print(f"{shown - start:.0f} s: {rounds} rounds, {resident():.0f} MiB", flush=True)
    grown = resident() - warm
    teams = mc.stats()["teams"].values()
    calls, volume = (sum(team[key] for team in teams) for key in ("calls", "bytes"))
    mc.finalize()
    if not warm or grown > 16:
        raise AssertionError(f"rank {rank}: {rounds} rounds, {grown:+.1f} MiB since the warm-up; seed {seed}")
    if rank == 0:
        print(f"soak: {rounds} rounds, {calls} calls, {volume / 2**30:.1f} GiB, {grown:+.1f} MiB; seed {seed}")


if __name__ == "__main__":
    main()
