"""Runs the benchmark: the contenders of each case train, are verified, run their trials, and get statistics."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.common.benchmark_run import BenchmarkRun, rotated
from benchmarks.common.processes import Answer, Lost
from benchmarks.common.tools import Tools
from benchmarks.training import contenders
from benchmarks.training.contenders import Training
from benchmarks.training.models import Model
from benchmarks.training.verify import JUDGED, Verification

UNTIMED = 2
"""Warm-up steps at the start of each trial."""


@dataclass(frozen=True)
class Options:
    """Durations and repetitions.

    Attributes:
        rounds: Trials of a contender in a case.
        steps: Timed steps of a trial; None is the model's number.
        warm_up: Steps before the first trial; dl_comm finds its bucket size in about 25.
        only: The names of the selected contenders.
        start_s: Limit of the start of the contenders.
        deadline_s: Limit of a trial, and of the steps before the first one.
    """

    rounds: int = 7
    steps: int | None = None
    warm_up: int = 40
    only: tuple[str, ...] = contenders.NAMES
    start_s: float = 180.0
    deadline_s: float = 300.0


@dataclass
class Entry:
    """A contender in a case; each trial is an array (ranks, 3, steps): step, reported exposed and total seconds."""

    contender: Training
    trials: list[np.ndarray] = field(default_factory=list)
    done: int = 0
    left_out: str = ""


class Bench(BenchmarkRun[Training]):
    """A benchmark run; `cases` has the results for the JSON file."""

    def __init__(self, tools: Tools, options: Options, root: Path) -> None:
        """`root` is the root of the repository, the working directory of the processes."""
        super().__init__(tools, root, options.start_s)
        self.options = options
        self.cases: list[dict[str, Any]] = []

    def run(self, model: Model, ranks: int) -> None:
        """Measures a model on `ranks` ranks."""
        begin = time.monotonic()
        # On one rank, `one` equals `independent`.
        names = [name for name in self.options.only if ranks > 1 or name != "one"]
        chosen = [contender for contender in contenders.of(model) if contender.name in names]
        self.log(f"{ranks} rank(s), {model.name}: {', '.join(contender.name for contender in chosen)}")
        verification = Verification()
        with self.running(chosen, ranks, model=model.name) as present, TemporaryDirectory() as folder:
            self.check_idle(ranks)
            entries = [Entry(contender) for contender in present]
            parameters = self._prepare(entries, ranks, verification, Path(folder))
            for number in range(self.options.rounds):
                for entry in rotated(entries, number):
                    trial = self._steps(entry, ranks, UNTIMED + (self.options.steps or model.steps))
                    if trial is not None:
                        entry.trials.append(trial[:, :, UNTIMED:])
                self.log(f"  round {number + 1} of {self.options.rounds}: {', '.join(map(_progress, entries))}")
            self._agreement(entries, self._digests(entries, ranks), verification)
        for problem in verification.problems:
            self.failed = True
            self.log(f"  wrong: {problem}")
        case = {"ranks": ranks, "model": model.name, "framework": model.framework, "what": model.what}
        case |= {"batch": model.batch, "parameters": parameters, "warm_up": self.options.warm_up}
        self.cases.append({**case, "verified": verification.report(), "results": _results(entries)})
        self.log(f"  took {time.monotonic() - begin:.1f} s")

    def _prepare(self, entries: Sequence[Entry], ranks: int, verification: Verification, folder: Path) -> int:
        """Runs and verifies the steps before the first trial. Returns the number of parameters."""
        (folder / "first").mkdir()
        digests = self._digests(entries, ranks, folder / "first")
        if not digests:
            return 0
        verification.start(digests)
        first = folder / "first" / next(iter(digests))
        few = min(JUDGED, self.options.warm_up)
        for steps in (few, self.options.warm_up - few):
            if steps:
                self._advance(entries, ranks, steps, verification, first)
        return first.stat().st_size // np.dtype(np.float32).itemsize

    def _advance(
        self, entries: Sequence[Entry], ranks: int, steps: int, verification: Verification, first: Path
    ) -> None:
        """Runs untimed steps, and compares the parameters with each other and with the `first` ones."""
        for entry in entries:
            begin = time.monotonic()
            if self._steps(entry, ranks, steps) is not None:
                self.log(f"  {entry.contender.name}: {entry.done} steps, {time.monotonic() - begin:.1f} s")
        folder = first.parents[1]
        digests = self._digests(entries, ranks, folder)
        self._agreement(entries, digests, verification)
        # One rank is compared with training without communication; more ranks with the peer.
        compared = [e for e in entries if e.contender.name in digests and (ranks == 1 or e.contender.averages)]
        for other in compared[1:]:
            one = compared[0].contender.name
            verification.distance(first, folder / one, folder / other.contender.name, other.done)

    def _agreement(
        self, entries: Sequence[Entry], digests: Mapping[str, Sequence[str]], verification: Verification
    ) -> None:
        for entry in entries:
            if (found := digests.get(entry.contender.name)) is not None:
                verification.agreement(entry.contender.name, found, entry.contender.averages, entry.done)

    def _digests(self, entries: Sequence[Entry], ranks: int, folder: Path | None = None) -> dict[str, Sequence[str]]:
        """Each rank's digest by contender; writes the parameters to a file for each contender in `folder`."""
        found: dict[str, Sequence[str]] = {}
        for entry in entries:
            name = entry.contender.name
            if (answer := self._trial(entry, ranks, f"parameters {folder / name if folder else '-'}\n", 0)) is not None:
                found[name] = answer.words
        return found

    def _steps(self, entry: Entry, ranks: int, steps: int) -> np.ndarray | None:
        """Steps of a contender, as an array (ranks, 3, steps); None if it is left out."""
        answer = self._trial(entry, ranks, f"steps {steps}\n", 3 * steps)
        if answer is None:
            return None
        entry.done += steps
        if not all(math.isfinite(float(loss)) for loss in answer.words):
            self._leave(entry, ranks, f"wrong: the ranks' losses are {', '.join(answer.words)}")
            return None
        return answer.numbers.reshape(len(answer.words), 3, steps)

    def _trial(self, entry: Entry, ranks: int, line: str, numbers: int) -> Answer | None:
        if entry.left_out:
            return None
        try:
            return self.trial(entry.contender, ranks, line, numbers, self.options.deadline_s)
        except Lost as error:
            self._leave(entry, ranks, f"lost: {error}")
            return None

    def _leave(self, entry: Entry, ranks: int, reason: str) -> None:
        entry.left_out = reason
        self.exclude(entry.contender, ranks, reason, failed=True)


def _results(entries: Sequence[Entry]) -> dict[str, Any]:
    base = next((e for e in entries if e.contender.name == "independent" and e.trials and not e.left_out), None)
    results = {}
    for entry in entries:
        about = {"group": entry.contender.group, "what": entry.contender.what}
        if entry.left_out:
            results[entry.contender.name] = {**about, "left_out": entry.left_out}
        else:
            numbers = summary(entry.trials, base.trials if base and entry.contender.averages else None)
            results[entry.contender.name] = {**about, **numbers}
    return results


def summary(trials: Sequence[np.ndarray], base: Sequence[np.ndarray] | None) -> dict[str, Any]:
    """Statistics of trials: arrays (ranks, 3, steps) of seconds. `base` has the same rounds without communication.

    A round's exposed communication is the difference of the medians of its steps; the result is the median over the
    rounds, with quartiles. `reported_*` are medians over the steps of the contender's own values.
    """
    # The mean over the ranks: (3, all steps).
    times, exposed, busy = 1e3 * np.concatenate([trial.mean(axis=0) for trial in trials], axis=1)
    low, median, high = np.percentile(times, [25, 50, 75])
    numbers: dict[str, Any] = {
        "step_ms": float(median),
        "quartiles_ms": [float(low), float(high)],
        "steps_per_s": float(1e3 / median),
        "steps": len(times),
        "rounds_ms": _rounds(trials),
        "reported_exposed_ms": _median_or_none(exposed),
        "reported_busy_ms": _median_or_none(busy),
    }
    if base is not None:
        differences = [mine - without for mine, without in zip(_rounds(trials), _rounds(base), strict=True)]
        low, median, high = np.percentile(differences, [25, 50, 75])
        numbers["exposed_ms"] = float(median)
        numbers["exposed_quartiles_ms"] = [float(low), float(high)]
        numbers["exposed_rounds_ms"] = differences
    return numbers


def _rounds(trials: Sequence[np.ndarray]) -> list[float]:
    return [float(1e3 * np.median(trial[:, 0].mean(axis=0))) for trial in trials]


def _median_or_none(milliseconds: np.ndarray) -> float | None:
    return None if np.isnan(milliseconds).any() else float(np.median(milliseconds))


def _progress(entry: Entry) -> str:
    return f"{entry.contender.name} {f'{_rounds(entry.trials)[-1]:.4g} ms' if not entry.left_out else 'left out'}"
