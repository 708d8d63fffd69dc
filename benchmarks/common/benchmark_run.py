"""Starts and stops the processes of all contenders of a benchmark, and checks that they are idle between trials."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from benchmarks.common import machine
from benchmarks.common.contenders import Contender
from benchmarks.common.processes import Answer, Lost, Processes
from benchmarks.common.tools import Missing, Tools

IDLE = 0.02
"""Largest share of a processor that an idle contender may use."""
QUIET = 0.2
"""Largest number of busy processors while all contenders sleep."""

Kind = TypeVar("Kind", bound=Contender)
Item = TypeVar("Item")


class BenchmarkRun(Generic[Kind]):
    """The processes of the contenders, with `left_out` and `idle` for the JSON file.

    `failed`: whether one of them was wrong or lost. Not thread-safe.
    """

    def __init__(self, tools: Tools, root: Path, start_s: float) -> None:
        """`root` is the working directory, the root of the repository; `start_s` limits the start of the processes."""
        self.tools, self.root, self.start_s = tools, root, start_s
        self.left_out: list[dict[str, Any]] = []
        self.idle: list[dict[str, Any]] = []
        self.failed = False
        self._processes: dict[str, Processes] = {}
        self._case: dict[str, Any] = {}
        self._folder = Path()
        self._begin = time.monotonic()

    def log(self, text: str) -> None:
        """Prints a line of progress."""
        print(f"[{time.monotonic() - self._begin:6.0f} s] {text}", flush=True)

    @contextmanager
    def running(self, contenders: Sequence[Kind], ranks: int, **case: str) -> Iterator[list[Kind]]:
        """Starts all contenders, yields those that are ready, and stops them all.

        `case` is added to `left_out` and `idle`, like the number of ranks.
        """
        self._case = {"ranks": ranks, **case}
        with ExitStack() as stack:
            # In memory if possible, with a short path because of the Unix sockets.
            memory = Path("/dev/shm")
            self._folder = Path(tempfile.mkdtemp(prefix="bench-", dir=memory if memory.is_dir() else None))
            stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
            stack.push(self._stop)
            yield self._start_all(contenders, ranks)

    def trial(self, contender: Kind, ranks: int, line: str, numbers: int, seconds: float) -> Answer:
        """Runs a trial (`Processes.trial`) of a contender; restarts a lost contender."""
        try:
            if contender.name not in self._processes:
                self._start(contender, ranks).ready(self.start_s)
            return self._processes[contender.name].trial(line, numbers, seconds)
        except Lost:
            del self._processes[contender.name]
            raise

    def check_idle(self, ranks: int) -> None:
        """Logs contenders that are not idle, and other load on the machine."""
        time.sleep(0.5)
        taken = machine.busy_seconds()
        before = {name: job.cpu_seconds() for name, job in self._processes.items()}
        begin = time.monotonic()
        time.sleep(1.0)
        taken = (machine.busy_seconds() - taken) / (time.monotonic() - begin)
        self.idle.append({"contender": None, **self._case, "share_of_a_processor": taken})
        if taken > QUIET:
            self.log(f"the machine is not quiet: {taken:.1f} processors are busy while all contenders sleep")
        for name, job in self._processes.items():
            share = (job.cpu_seconds() - before[name]) / (time.monotonic() - begin)
            self.idle.append({"contender": name, **self._case, "share_of_a_processor": share})
            if share > IDLE:
                self.log(f"{ranks} ranks, {name} uses {100 * share:.0f} % of a processor between its trials")

    def exclude(self, contender: Kind, ranks: int, reason: str, failed: bool) -> None:
        """Records that a contender is left out."""
        self.failed |= failed
        self.left_out.append({"contender": contender.name, **self._case, "reason": reason, "failed": failed})
        self.log(f"{ranks} ranks, {contender.name} is left out: {reason}")

    def _start_all(self, contenders: Sequence[Kind], ranks: int) -> list[Kind]:
        present = []
        for contender in contenders:
            try:
                self._start(contender, ranks)
            except Missing as error:
                self.exclude(contender, ranks, str(error), failed=False)
        for contender in contenders:
            if contender.name not in self._processes:
                continue
            try:
                self._processes[contender.name].ready(self.start_s)
                present.append(contender)
            except Lost as error:
                del self._processes[contender.name]
                self.exclude(contender, ranks, str(error), failed=True)
        return present

    def _start(self, contender: Kind, ranks: int) -> Processes:
        processes = contender.processes(ranks)
        job = Processes(contender.name, processes, contender.start(self.tools, processes), self._folder, self.root)
        self._processes[contender.name] = job
        return job

    def _stop(self, *error: object) -> None:
        for job in self._processes.values():
            if error[0]:
                job.kill()
            else:
                job.stop()
        self._processes.clear()


def rotated(items: Sequence[Item], by: int) -> list[Item]:
    """The items in the order of round `by`: each round starts with another item."""
    first = by % max(1, len(items))
    return [*items[first:], *items[:first]]
