"""Runs the stages of the gate, several at a time, and ends with a table of what each has taken.

``tests/run.sh [fast]`` installs the tools and starts this, in an environment without the shell's variables.
``tests/stages.py`` has the stages, ``tests/README.md`` a description. The
output of a stage goes to ``build/gate/STAGE.log``, and is printed if the stage fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from launch import kill_marked, run
from stages import STAGES, Stage

ROOT = Path(__file__).parents[1]
LOGS = ROOT / "build/gate"
SLOWEST = 10
PROGRESS_S = 60
TAIL = 15
_GATE = "DL_COMM_TEST_GATE"


@dataclass
class Result:
    """How a stage has ended: ``passed``, ``FAILED``, or ``not run`` after the failure of one that it needs.

    ``processor``: seconds of processors, of the command and all that it has started and waited for. ``tests``: of each
    test its outcome, seconds and processor seconds (``tests/conftest.py``).
    """

    stage: Stage
    outcome: str
    start: float = 0.0
    seconds: float = 0.0
    processor: float = 0.0
    tests: dict[str, tuple[str, float, float]] = field(default_factory=dict)


def mark(stage: Stage) -> str:
    """Marks all processes of a stage, whatever they start."""
    return f"{os.getpid()} {stage.name}"


def run_stage(stage: Stage, start: float) -> Result:
    """Runs the command of a stage, with its output and its tests in files."""
    log, record, times = (LOGS / f"{stage.name}.{what}" for what in ("log", "json", "times"))
    since = time.monotonic()
    timed = ["bash", "-c", '"$@"; code=$?; times >"$0"; exit $code', str(times), *stage.command]
    finished = run(timed, stage.limit_s, {"DL_COMM_TEST_RECORD": str(record), _GATE: mark(stage)}, log=log)
    seconds = time.monotonic() - since
    if finished.timed_out:
        kill_marked(_GATE, mark(stage))
        with log.open("a") as file:
            file.write(f"\nkilled after {stage.limit_s} s\n")
    outcome = "passed" if finished.returncode == 0 and not finished.timed_out else "FAILED"
    tests = json.loads(record.read_text()) if record.exists() else {}
    return Result(stage, outcome, since - start, seconds, processor_seconds(times), tests)


def processor_seconds(times: Path) -> float:
    """The user and system time of the children, from the output of ``times`` of bash; 0 if the stage was killed."""
    if not times.exists():
        return 0.0
    fields = [field.rstrip("s").split("m") for field in times.read_text().splitlines()[1].split()]
    return sum(60 * float(minutes) + float(seconds) for minutes, seconds in fields)


class Schedule:
    """Which stage may start: in the order of the list, after those that it needs, one for each processor."""

    def __init__(self, stages: Sequence[Stage], processors: int) -> None:
        self.waiting = list(stages)
        self.running: dict[Future[Result], Stage] = {}
        self.results: dict[str, Result] = {}
        self._names = {stage.name for stage in stages}
        self._processors = processors

    def next(self) -> Stage | None:
        """A stage that may start now; removes those that cannot run any more."""
        for stage in list(self.waiting):
            needed = [name for name in stage.after if name in self._names]
            if any(name in self.results and self.results[name].outcome != "passed" for name in needed):
                self.waiting.remove(stage)
                self.results[stage.name] = Result(stage, "not run")
                return self.next()
            if len(self.running) < self._processors and all(name in self.results for name in needed):
                self.waiting.remove(stage)
                return stage
        return None


def run_all(stages: Sequence[Stage], processors: int) -> list[Result]:
    """Runs the stages; a failure ends only those that need the failed one. Prints a line for each start and end."""
    schedule, begin = Schedule(stages, processors), time.monotonic()

    def say(text: str) -> None:
        seconds = time.monotonic() - begin
        print(f"{int(seconds) // 60:3}:{int(seconds) % 60:02} {text}", flush=True)

    with ThreadPoolExecutor(len(stages)) as pool:
        try:
            while schedule.waiting or schedule.running:
                while (stage := schedule.next()) is not None:
                    say(f"start   {stage.name}")
                    schedule.running[pool.submit(run_stage, stage, begin)] = stage
                done, _ = wait(schedule.running, PROGRESS_S, FIRST_COMPLETED)
                if not done and schedule.running:
                    say(f"running {', '.join(stage.name for stage in schedule.running.values())}")
                for future in done:
                    del schedule.running[future]
                    result = future.result()
                    schedule.results[result.stage.name] = result
                    say(f"{result.outcome:7} {result.stage.name} ({result.seconds:.0f} s)")
                    if result.outcome == "FAILED":
                        print((LOGS / f"{result.stage.name}.log").read_text(errors="replace"), flush=True)
        except BaseException:
            # Ctrl-C does not reach the stages: they are process groups of their own.
            for stage in schedule.running.values():
                kill_marked(_GATE, mark(stage))
            raise
    return [schedule.results[stage.name] for stage in stages]


def table(results: Iterable[Result]) -> list[str]:
    """The stages with their seconds and numbers of tests, then the slowest tests, as lines of Markdown."""
    lines = ["| stage | result | started at | seconds | of processors | tests | skipped |"]
    lines.append("|---|---|---|---|---|---|---|")
    tests = []
    for result in results:
        name, outcomes = result.stage.name, [outcome for outcome, _, _ in result.tests.values()]
        tests += [(seconds, used, f"{name}: {test}") for test, (_, seconds, used) in result.tests.items()]
        count = (str(len(outcomes)), str(outcomes.count("skipped"))) if outcomes else ("", "")
        took = f"{result.start:.0f} | {result.seconds:.0f} | {result.processor:.0f}"
        lines.append(f"| {name} | {result.outcome} | {took} | {' | '.join(count)} |")
    lines += ["", "| slowest tests | seconds | of a processor |", "|---|---|---|"]
    for seconds, used, test in sorted(tests, reverse=True)[:SLOWEST]:
        lines.append(f"| {test} | {seconds:.1f} | {used:.1f} |")
    return lines


def ends(results: Iterable[Result]) -> list[str]:
    """The last lines of the failed stages: many viewers of a log show only its end."""
    lines = []
    for result in results:
        if result.outcome == "FAILED":
            log = (LOGS / f"{result.stage.name}.log").read_text(errors="replace").splitlines()
            lines += ["", f"The end of {result.stage.name}:", *log[-TAIL:]]
    return lines


def chosen(arguments: argparse.Namespace) -> list[Stage]:
    """The stages to run."""
    if arguments.fast:
        return [stage for stage in STAGES if stage.fast]
    if not arguments.stages:
        return list(STAGES)
    names = [stage.name for stage in STAGES]
    if unknown := [name for name in arguments.stages if name not in names]:
        raise SystemExit(f"tests/run.sh: no stage {', '.join(unknown)}; there are {', '.join(names)}, and 'fast'")
    return [stage for stage in STAGES if stage.name in arguments.stages]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="tests/run.sh", description="Sets everything up, then runs all checks and tests."
    )
    parser.add_argument("stages", nargs="*", help="only these; 'fast': what takes less than four minutes after set-up")
    arguments = parser.parse_args()
    # A job in the background ignores it, and so would all that tests send it to.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    arguments.fast = arguments.stages == ["fast"]
    stages = chosen(arguments)
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    since = time.monotonic()
    results = run_all(stages, max(2, os.cpu_count() or 2))
    lines = table(results)
    (LOGS / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(["", *lines, *ends(results), ""]))
    bad = [result.stage.name for result in results if result.outcome != "passed"]
    seconds = time.monotonic() - since
    print(f"{f'FAILED: {chr(44).join(bad)}' if bad else 'all passed'}, {seconds / 60:.1f} minutes")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
