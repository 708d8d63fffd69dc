"""Runs the benchmark: starts the contenders, runs trials in rounds, and computes statistics."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.allreduce.build import cache_line_ns
from benchmarks.allreduce.cases import Case
from benchmarks.allreduce.contenders import AllreduceContender
from benchmarks.common import machine
from benchmarks.common.benchmark_run import BenchmarkRun, rotated
from benchmarks.common.processes import Lost, Refused, TimedOut, Wrong
from benchmarks.common.tools import Tools

PROBE = 3
PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p99_9": 99.9}


@dataclass(frozen=True)
class Options:
    """Durations and repetitions.

    Attributes:
        rounds: Trials of a contender in a case.
        trial_s: Target time of the timed iterations of a trial, in seconds.
        latency_s: The same for percentiles.
        most: Maximum of timed iterations in a trial; None: the case's own limit.
        case_s: A contender that has used this time in a case gets no further trials there.
        start_s: Limit of the start of the contenders.
        deadline_s: Limit of a trial. After a timeout, longer buffers or lists of the kind are skipped.
    """

    rounds: int = 3
    trial_s: float = 0.1
    latency_s: float = 0.5
    most: int | None = None
    case_s: float = 20.0
    start_s: float = 120.0
    deadline_s: float = 60.0


@dataclass
class Entry:
    """A contender in a case, with its mode; `seconds` has an array for each trial, with the slowest rank's times."""

    contender: AllreduceContender
    mode: str
    iterations: int = 0
    spent_s: float = 0.0
    seconds: list[np.ndarray] = field(default_factory=list)
    checked: int = 0
    left_out: str = ""
    failed: bool = False

    @property
    def name(self) -> str:
        """The contender's name, with its mode if there are several."""
        return self.contender.name if self.mode == "list" else f"{self.contender.name}/{self.mode}"


class Bench(BenchmarkRun[AllreduceContender]):
    """A benchmark run; `cases` has the results for the JSON file."""

    def __init__(self, contenders: Sequence[AllreduceContender], tools: Tools, options: Options, root: Path) -> None:
        """`root` is the root of the repository, the working directory of Python contenders."""
        super().__init__(tools, root, options.start_s)
        self.contenders, self.options = contenders, options
        self.cases: list[dict[str, Any]] = []
        self._cache = machine.last_level_cache()
        self._late: dict[tuple[str, str], int] = {}

    def run(self, ranks: int, cases: Sequence[Case]) -> None:
        """Measures all cases on `ranks` ranks."""
        self._late.clear()
        with self.running(self.contenders, ranks) as present:
            self.check_idle(ranks)
            for number, case in enumerate(cases):
                begin = time.monotonic()
                entries = self._measure(case, present, ranks)
                self.cases.append(self._report(case, ranks, entries))
                text = ", ".join(_progress(entry) for entry in entries)
                took = time.monotonic() - begin
                self.log(f"{ranks} ranks, {number + 1}/{len(cases)}: {case.kind} {case.name} {case.dtype}: {text}")
                self.log(f"  took {took:.1f} s")

    def _measure(self, case: Case, present: Sequence[AllreduceContender], ranks: int) -> list[Entry]:
        entries = [Entry(contender, mode) for contender in present for mode in _modes(contender, case)]
        seconds = self.options.latency_s if case.kind == "latency" else self.options.trial_s
        for entry in entries:
            late = self._late.get((entry.name, case.kind))
            if late is not None and case.bytes >= late:
                entry.left_out = f"too slow: {late} bytes took longer than {self.options.deadline_s:g} s"
                continue
            if (probe := self._trial(entry, case, PROBE, ranks)) is not None:
                entry.iterations = case.iterations(seconds, float(np.median(probe)), self.options.most)
        for number in range(self.options.rounds):
            for entry in rotated(entries, number):
                if not entry.left_out and (number == 0 or entry.spent_s < self.options.case_s):
                    times = self._trial(entry, case, entry.iterations, ranks)
                    if times is not None:
                        entry.seconds.append(times)
        return entries

    def _trial(self, entry: Entry, case: Case, iterations: int, ranks: int) -> np.ndarray | None:
        """One trial: the slowest rank's seconds for each iteration. None if the entry is left out."""
        line = case.trial(entry.mode, iterations, self._cache)
        begin = time.monotonic()
        try:
            answer = self.trial(entry.contender, ranks, line, iterations, self.options.deadline_s)
        except Refused as error:
            entry.left_out = str(error)
            return None
        except Wrong as error:
            entry.left_out, entry.failed = f"wrong: {error}", True
        except Lost as error:
            entry.left_out, entry.failed = f"lost: {error}", not isinstance(error, TimedOut)
            if isinstance(error, TimedOut):
                self._late[entry.name, case.kind] = case.bytes
        else:
            entry.spent_s += time.monotonic() - begin
            entry.checked += sum(map(int, answer.words))
            slowest: np.ndarray = np.max(answer.numbers, axis=0)
            return slowest
        self.failed |= entry.failed
        self.log(f"{entry.name}, {case.kind} {case.name} {case.dtype}: {entry.left_out}")
        return None

    def _report(self, case: Case, ranks: int, entries: Sequence[Entry]) -> dict[str, Any]:
        results = {}
        for entry in entries:
            contender = {"contender": entry.contender.name, "group": entry.contender.group, "mode": entry.mode}
            if entry.left_out:
                results[entry.name] = {**contender, "left_out": entry.left_out, "failed": entry.failed}
            else:
                results[entry.name] = {**contender, **summary(entry.seconds, case.kind), "checked": entry.checked}
        return {
            "ranks": ranks,
            "kind": case.kind,
            "name": case.name,
            "dtype": case.dtype,
            "tensors": len(case.lengths),
            "bytes": case.bytes,
            "cache_line_ns": cache_line_ns(self.tools),
            "results": results,
        }


def summary(rounds: Sequence[np.ndarray], kind: str) -> dict[str, Any]:
    """Statistics of the times (seconds) of all rounds, in microseconds."""
    times = 1e6 * np.concatenate(rounds)
    low, median, high = np.percentile(times, [25, 50, 75])
    numbers = {
        "median_us": float(median),
        "quartiles_us": [float(low), float(high)],
        "least_us": float(times.min()),
        "iterations": len(times),
        "rounds_us": [float(1e6 * np.median(part)) for part in rounds],
    }
    if kind == "latency":
        # A percentile needs at least 5 times beyond it.
        enough = {name: at for name, at in PERCENTILES.items() if len(times) * (1 - at / 100) >= 5}
        numbers["percentiles_us"] = {name: float(np.percentile(times, at)) for name, at in enough.items()}
    return numbers


def _modes(contender: AllreduceContender, case: Case) -> tuple[str, ...]:
    return contender.modes if case.kind == "list" else ("list",)


def _progress(entry: Entry) -> str:
    if entry.left_out:
        return f"{entry.name} left out ({entry.left_out.splitlines()[0][:60]})"
    return f"{entry.name} {1e6 * float(np.median(np.concatenate(entry.seconds))):.5g}"
