"""The run: contenders are started, take their turns in rounds, and their times become numbers."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.allreduce import machine
from benchmarks.allreduce.build import Missing, Tools
from benchmarks.allreduce.cases import Case
from benchmarks.allreduce.contenders import Contender
from benchmarks.allreduce.jobs import Job, Late, Lost, Refused, Wrong

PROBE = 3
IDLE = 0.02
"""The share of a processor that a contender may take while it is not its turn."""
QUIET = 0.2
"""The processors that may be busy while all contenders sleep."""
PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p99_9": 99.9}


@dataclass(frozen=True)
class Options:
    """How long and how often.

    Attributes:
        rounds: Turns of a contender in a case.
        turn_s: What the timed iterations of a turn should take, in seconds.
        latency_s: The same where percentiles are taken.
        most: The most timed iterations of a turn; None is as many as the case has by itself.
        start_s: The longest that contenders may take to start.
        deadline_s: The longest that a turn may take.
    """

    rounds: int = 5
    turn_s: float = 0.1
    latency_s: float = 0.5
    most: int | None = None
    start_s: float = 120.0
    deadline_s: float = 120.0


@dataclass
class Entry:
    """A contender in a case, and the way it averages; `seconds` are the slowest rank's, an array a turn."""

    contender: Contender
    way: str
    iterations: int = 0
    seconds: list[np.ndarray] = field(default_factory=list)
    checked: int = 0
    left_out: str = ""
    failed: bool = False

    @property
    def name(self) -> str:
        """The contender's name, and how it averages a list where there are several ways."""
        return self.contender.name if self.way == "list" else f"{self.contender.name}/{self.way}"


class Bench:
    """One run, and its results in `cases`, `left_out` and `idle`, as the JSON file has them."""

    def __init__(self, contenders: Sequence[Contender], tools: Tools, options: Options, root: Path) -> None:
        """`root` is the root of the repository, where Python contenders are started."""
        self.contenders, self.tools, self.options, self.root = contenders, tools, options, root
        self.cases: list[dict[str, Any]] = []
        self.left_out: list[dict[str, Any]] = []
        self.idle: list[dict[str, Any]] = []
        self.failed = False
        self._jobs: dict[str, Job] = {}
        self._cache = machine.last_level_cache()
        self._begin = time.monotonic()

    def run(self, ranks: int, cases: Sequence[Case]) -> None:
        """Measures all cases on so many ranks."""
        with ExitStack() as stack:
            folder = Path(tempfile.mkdtemp(prefix="allreduce-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            stack.push(self._stop)
            present = self._start_all(ranks, folder)
            self._look_at_idle(ranks)
            for number, case in enumerate(cases):
                begin = time.monotonic()
                entries = self._measure(case, present, ranks, folder)
                self.cases.append(self._report(case, ranks, entries))
                words = ", ".join(_progress(entry) for entry in entries)
                took = time.monotonic() - begin
                self.say(f"{ranks} ranks, {number + 1}/{len(cases)}: {case.kind} {case.name} {case.dtype}: {words}")
                self.say(f"  took {took:.1f} s")

    def say(self, text: str) -> None:
        """A line of progress."""
        print(f"[{time.monotonic() - self._begin:6.0f} s] {text}", flush=True)

    def _start_all(self, ranks: int, folder: Path) -> list[Contender]:
        """Starts all contenders side by side; returns those that have come up."""
        present = []
        for contender in self.contenders:
            try:
                self._start(contender, ranks, folder)
            except Missing as error:
                self._leave_out(contender, ranks, str(error), failed=False)
        for contender in self.contenders:
            if contender.name not in self._jobs:
                continue
            try:
                self._jobs[contender.name].ready(self.options.start_s)
                present.append(contender)
            except Lost as error:
                del self._jobs[contender.name]
                self._leave_out(contender, ranks, str(error), failed=True)
        return present

    def _start(self, contender: Contender, ranks: int, folder: Path) -> Job:
        job = Job(contender.name, ranks, contender.start(self.tools, ranks), folder, self.root)
        self._jobs[contender.name] = job
        return job

    def _stop(self, *error: object) -> None:
        for job in self._jobs.values():
            if error[0]:
                job.kill()
            else:
                job.stop()
        self._jobs.clear()

    def _leave_out(self, contender: Contender, ranks: int, reason: str, failed: bool) -> None:
        self.failed |= failed
        self.left_out.append({"contender": contender.name, "ranks": ranks, "reason": reason, "failed": failed})
        self.say(f"{ranks} ranks, {contender.name} is left out: {reason}")

    def _look_at_idle(self, ranks: int) -> None:
        """Whether contenders sleep while it is not their turn, and nobody else is at work."""
        time.sleep(0.5)
        taken = machine.busy_seconds()
        before = {name: job.cpu_seconds() for name, job in self._jobs.items()}
        begin = time.monotonic()
        time.sleep(1.0)
        taken = (machine.busy_seconds() - taken) / (time.monotonic() - begin)
        self.idle.append({"contender": None, "ranks": ranks, "share_of_a_processor": taken})
        if taken > QUIET:
            self.say(f"the machine is not quiet: {taken:.1f} processors are busy while all contenders sleep")
        for name, job in self._jobs.items():
            share = (job.cpu_seconds() - before[name]) / (time.monotonic() - begin)
            self.idle.append({"contender": name, "ranks": ranks, "share_of_a_processor": share})
            if share > IDLE:
                self.say(f"{ranks} ranks, {name} takes {100 * share:.0f} % of a processor while it is not its turn")

    def _measure(self, case: Case, present: Sequence[Contender], ranks: int, folder: Path) -> list[Entry]:
        entries = [Entry(contender, way) for contender in present for way in _ways(contender, case)]
        seconds = self.options.latency_s if case.kind == "latency" else self.options.turn_s
        for entry in entries:
            if (probe := self._turn(entry, case, PROBE, ranks, folder)) is not None:
                entry.iterations = case.iterations(seconds, float(np.median(probe)), self.options.most)
        for number in range(self.options.rounds):
            first = number % max(1, len(entries))
            for entry in [*entries[first:], *entries[:first]]:
                if not entry.left_out:
                    times = self._turn(entry, case, entry.iterations, ranks, folder)
                    if times is not None:
                        entry.seconds.append(times)
        return entries

    def _turn(self, entry: Entry, case: Case, iterations: int, ranks: int, folder: Path) -> np.ndarray | None:
        """One turn: the slowest rank's seconds for each iteration. None when the entry must be left out."""
        name = entry.contender.name
        try:
            if name not in self._jobs:  # it was lost in another case
                self._start(entry.contender, ranks, folder).ready(self.options.start_s)
            line = case.turn(entry.way, iterations, self._cache)
            answer = self._jobs[name].turn(line, iterations, self.options.deadline_s)
        except Refused as error:
            entry.left_out = str(error)
            return None
        except Wrong as error:
            entry.left_out, entry.failed = f"wrong: {error}", True
        except Lost as error:
            del self._jobs[name]
            entry.left_out, entry.failed = f"lost: {error}", not isinstance(error, Late)
        else:
            entry.checked += answer.checked
            slowest: np.ndarray = np.max(answer.times, axis=0)
            return slowest
        self.failed |= entry.failed
        self.say(f"{entry.name}, {case.kind} {case.name} {case.dtype}: {entry.left_out}")
        return None

    def _report(self, case: Case, ranks: int, entries: Sequence[Entry]) -> dict[str, Any]:
        results = {}
        for entry in entries:
            contender = {"contender": entry.contender.name, "group": entry.contender.group, "way": entry.way}
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
            "results": results,
        }


def summary(rounds: Sequence[np.ndarray], kind: str) -> dict[str, Any]:
    """Numbers of the times (seconds) of all rounds, in microseconds."""
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
        # A percentile needs some times beyond it.
        enough = {name: at for name, at in PERCENTILES.items() if len(times) * (1 - at / 100) >= 5}
        numbers["percentiles_us"] = {name: float(np.percentile(times, at)) for name, at in enough.items()}
    return numbers


def _ways(contender: Contender, case: Case) -> tuple[str, ...]:
    return contender.ways if case.kind == "list" else ("list",)


def _progress(entry: Entry) -> str:
    if entry.left_out:
        return f"{entry.name} left out ({entry.left_out.splitlines()[0][:60]})"
    return f"{entry.name} {1e6 * float(np.median(np.concatenate(entry.seconds))):.5g}"
