"""What one GPU shows in a quarter of an hour: nine steps, each with its limit in seconds and the numbers it must show.

    python tests/gpu/quarter_hour.py FOLDER [--steps N...] [--nccl LIBRARY] [--dry-run DRIVER]

tests/gpu/quarter_hour.sh calls it. No step stops the others. FOLDER gets a log for each step and quarter_hour.json,
which tests/gpu/quarter_hour_table.py formats. The exit status is 1 if a step failed or a number is not as it must be.
A dry run needs no GPU: step 1 and 5 run on the simulated driver in the folder DRIVER, the others on host memory, all
shortened. It judges no numbers, since they are those of another machine.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent)]

from launch import run  # noqa: E402
from results import figures, machine, versions  # noqa: E402

KIB, MIB = 1 << 10, 1 << 20
TESTS = [
    f"tests/gpu/test_gpu_{name}.py" for name in ("average", "calls", "collectives", "arrays", "streams", "training")
]
SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
NEWEST_REFUSED = 22999
"""Up to this version, NCCL refuses to run several ranks on a GPU."""


@dataclass
class Shown:
    """What a step has left: microseconds by name (latency.py), by contender and bytes (benchmarks), and its output."""

    seconds: float
    output: str
    latency: dict[str, float] = field(default_factory=dict)
    medians: dict[str, dict[int, float]] = field(default_factory=dict)

    def most(self, pattern: str) -> float | None:
        """The largest latency whose name matches."""
        return max((number for name, number in self.latency.items() if re.search(pattern, name)), default=None)

    def median(self, contender: str, size: int) -> float | None:
        """The median of a contender."""
        return self.medians.get(contender, {}).get(size)

    def against(self, one: str, other: str, sizes: range, combine: Callable[[float, float], float]) -> float | None:
        """The largest value of two contenders' medians, over the sizes that both have."""
        mine, theirs = self.medians.get(one, {}), self.medians.get(other, {})
        return max(
            (combine(mine[size], theirs[size]) for size in mine if size in theirs and size in sizes), default=None
        )

    def counted(self, pattern: str) -> float | None:
        """The sum of the numbers that a pattern finds in the output; None if it finds none."""
        found = re.findall(pattern, self.output)
        return float(sum(map(int, found))) if found else None

    def not_passed(self) -> float | None:
        """The tests that failed, on all ranks; None unless some passed or failed."""
        if self.counted(r"(\d+) (?:passed|failed)") is None:
            return None
        return self.counted(r"(\d+) (?:failed|error)") or 0.0


@dataclass(frozen=True)
class Must:
    """A number that a step must show: at most this much. ``read`` takes it from what the step has left."""

    what: str
    unit: str
    at_most: float
    read: Callable[[Shown], float | None]


@dataclass(frozen=True)
class Step:
    """A step; ``command`` makes its command line for its folder, shortened or not."""

    what: str
    limit_s: int
    command: Callable[[Path, bool], list[str]]
    must: tuple[Must, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    mps: bool = False
    nccl: bool = False
    memcheck: bool = False


def latency(folder: Path, short: bool) -> list[str]:
    """latency.py."""
    return [sys.executable, "tests/gpu/latency.py", "3" if short else "200", str(folder / "latency.json")]


def benchmark(sizes: Sequence[int], *contenders: str) -> Callable[[Path, bool], list[str]]:
    """benchmarks.allreduce of float32 in place on 2 ranks."""

    def command(folder: Path, short: bool) -> list[str]:
        chosen = [str(size) for size in sizes if not short or size <= 64 * KIB]
        length = ["--rounds", "1", "--trial-s", "0.001"] if short else ["--rounds", "2", "--trial-s", "0.05"]
        words = ["--device", "cuda", "--ranks", "2", "--dtypes", "f32", "--kinds", "buffer", "--sizes", *chosen]
        return [
            sys.executable,
            "-m",
            "benchmarks.allreduce",
            *words,
            *length,
            "--only",
            # torch's NCCL has no dry run.
            *(name for name in contenders if not short or name != "torch-nccl"),
            "--out",
            str(folder),
        ]

    return command


def on_ranks(ranks: int, seconds: int, *words: str) -> Callable[[Path, bool], list[str]]:
    """Tests on ranks; shortened, the first file only."""
    pytest = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--maxfail=5"]

    def command(_: Path, short: bool) -> list[str]:
        chosen = ["-k", "integers or lists_keep", TESTS[0]] if short else words
        return [sys.executable, "tests/launch.py", str(ranks), str(seconds), *pytest, *chosen]

    return command


def memcheck(_: Path, short: bool) -> list[str]:
    """compute-sanitizer on averages; one allocation for each tensor, so that an access beyond its end is detected."""
    found = sanitizer()
    check = [found, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "86", "--print-limit", "20"]
    pytest = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-k", "not large and not thousands", TESTS[0]]
    return [sys.executable, "tests/launch.py", "2", "85", *([] if short or not found else map(str, check)), *pytest]


def busy(_: Path, short: bool) -> list[str]:
    """The fault of a GPU that is busy past the deadline; shortened, of a rank that is late."""
    which = "misses_the_deadline" if short else "busy and long"
    return [sys.executable, "-m", "pytest", "-q", "--tb=short", "-k", which, "tests/gpu/test_gpu_faults.py"]


def sanitizer() -> str | None:
    """The path of compute-sanitizer."""
    usual = sorted(map(str, Path("/usr/local").glob("cuda*/bin/compute-sanitizer")))
    return shutil.which("compute-sanitizer") or next(iter(usual), None)


def ratio(one: float, other: float) -> float:
    """A contender's time as a multiple of another's."""
    return one / other


def more(one: float, other: float) -> float:
    """The microseconds that a contender takes more than another."""
    return one - other


NO_FAILURE = Must("tests that failed", "", 0, Shown.not_passed)
SMALL = range(MIB)
LARGE = range(MIB, 1 << 40)
STEPS = (
    Step(
        "parts of a call",
        40,
        latency,
        (
            Must("copy of 64 KiB, two processes", "us", 60, lambda shown: shown.most(r"copy of 64 KiB")),
            Must("flag to another stream, event back", "us", 10, lambda shown: shown.most("another stream")),
        ),
    ),
    Step(
        "short calls: `ipc`, `staged`",
        75,
        benchmark(
            [4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 2 * MIB], "ipc", "staged", "limit-copy", "limit-pinned"
        ),
        (
            Must(
                "`staged` / `ipc` to 1 MiB",
                "",
                1,
                lambda shown: shown.against("staged", "ipc", range(MIB + 1), ratio),
            ),
        ),
    ),
    Step(
        "tests of `ipc` on 3 ranks", 80, on_ranks(3, 75, *TESTS), (NO_FAILURE,), {"DL_COMM_GPU_PATH": "ipc", **SHARED}
    ),
    Step(
        "`compute-sanitizer` on 2 ranks",
        90,
        memcheck,
        (
            Must("invalid accesses", "", 0, lambda shown: shown.counted(r"ERROR SUMMARY: (\d+) error")),
            NO_FAILURE,
        ),
        {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "DL_COMM_TIMEOUT_S": "80"},
        memcheck=True,
    ),
    Step(
        "parts of a call, MPS",
        30,
        latency,
        (
            Must("flag written and waited for", "us", 6, lambda shown: shown.most("written and waited")),
            Must("flag to another stream, event back", "us", 10, lambda shown: shown.most("another stream")),
        ),
        mps=True,
    ),
    Step(
        "`ipc`, MPS",
        50,
        benchmark([4 * KIB, 64 * KIB, 256 * KIB, MIB, 16 * MIB, 256 * MIB], "ipc", "limit-copy"),
        (
            Must("4 KiB", "us", 20, lambda shown: shown.median("ipc", 4 * KIB)),
            Must("1 MiB", "us", 45, lambda shown: shown.median("ipc", MIB)),
            Must(
                "256 MiB / the GPU's copy",
                "",
                1.11,
                lambda shown: shown.against("ipc", "limit-copy", range(256 * MIB, 256 * MIB + 1), ratio),
            ),
        ),
        mps=True,
    ),
    Step(
        "`nccl` and torch's NCCL, MPS",
        60,
        benchmark([4 * KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB], "nccl", "torch-nccl"),
        (
            Must(
                "more than torch below 1 MiB", "us", 10, lambda shown: shown.against("nccl", "torch-nccl", SMALL, more)
            ),
            Must(
                "`nccl` / torch from 1 MiB", "", 1.05, lambda shown: shown.against("nccl", "torch-nccl", LARGE, ratio)
            ),
        ),
        SHARED,
        mps=True,
        nccl=True,
    ),
    Step(
        "`nccl`, MPS, `NCCL_COMM_BLOCKING=1`",
        45,
        benchmark([4 * KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB], "nccl"),
        (Must("4 KiB", "us", 55, lambda shown: shown.median("nccl", 4 * KIB)),),
        {**SHARED, "NCCL_COMM_BLOCKING": "1"},
        mps=True,
        nccl=True,
    ),
    Step(
        "a GPU that is busy past the deadline, `nccl`",
        60,
        busy,
        (NO_FAILURE, Must("seconds", "s", 40, lambda shown: shown.seconds)),
        {**SHARED, "DL_COMM_GPU_PATH": "nccl"},
        nccl=True,
    ),
)


def nccl_version(library: str | None) -> int | None:
    """The version of the NCCL that the ranks load: this library, or the one of torch. None without any."""
    version = ctypes.c_int()
    try:
        import torch  # noqa: F401  # loads its NCCL

        ctypes.CDLL(library or "libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    except (ImportError, OSError):
        return None
    return version.value


def version_text(number: int) -> str:
    """NCCL's version: 23007 is 2.30.7."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


@contextlib.contextmanager
def mps() -> Iterator[dict[str, str]]:
    """NVIDIA's Multi-Process Service, and the variables of its clients."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        environment = {**os.environ, **variables}
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment, timeout=20, check=True)
        try:
            yield variables
        finally:
            subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", env=environment, timeout=20, check=False)


class QuarterHour:
    """A run: the steps in order, and their results."""

    def __init__(self, folder: Path, nccl: str | None, driver: str | None) -> None:
        self.folder, self.nccl, self.driver = folder, nccl, driver
        self.nccl_version = nccl_version(nccl)
        self.steps: list[dict[str, Any]] = []

    @property
    def dry(self) -> bool:
        """Whether no GPU is used."""
        return self.driver is not None

    def lacks(self, step: Step) -> str | None:
        """Why a step is left out."""
        if step.memcheck and sanitizer() is None:
            return "no compute-sanitizer"
        if self.dry:
            return None
        if step.mps and shutil.which("nvidia-cuda-mps-control") is None:
            return "no nvidia-cuda-mps-control"
        if step.nccl and (self.nccl_version or 0) <= NEWEST_REFUSED:
            return "needs NCCL 2.30 or later"
        return None

    def environment(self, step: Step) -> dict[str, str]:
        """The variables of a step."""
        found = {"OMP_NUM_THREADS": "1", **step.environment}
        if self.driver is not None:
            # torch must not load the simulated NCCL beside the driver.
            simulated = {"LD_LIBRARY_PATH": self.driver} if step.command is latency else {}
            return {**found, **simulated, "BENCH_DEVICE": "cpu", "DL_COMM_TEST_DEVICE": "cpu"}
        if step.nccl and self.nccl is not None:
            found["LD_PRELOAD"] = self.nccl
        return found

    def run(self, number: int, step: Step) -> None:
        """Runs a step and keeps its results."""
        print(f"### {number} {step.what}, at most {step.limit_s} s", flush=True)
        row: dict[str, Any] = {"number": number, "what": step.what, "limit_s": step.limit_s}
        if reason := self.lacks(step):
            self.steps.append(
                {**row, "status": "left out", "why": reason, "seconds": 0.0, "numbers": [], "medians": {}}
            )
            print(f"left out: {reason}", flush=True)
            return
        folder = self.folder / str(number)
        folder.mkdir(exist_ok=True)
        since, why = time.monotonic(), ""
        try:
            with mps() if step.mps and not self.dry else contextlib.nullcontext({}) as variables:
                environment = {**self.environment(step), **variables}
                command = step.command(folder, self.dry)
                finished = run(command, step.limit_s, environment, log=folder / "log.txt")
            status = "timed out" if finished.timed_out else "passed" if finished.returncode == 0 else "failed"
            output = finished.output
        except (OSError, subprocess.SubprocessError) as error:
            status, output, why = "failed", "", str(error)
        shown = read(folder, output, time.monotonic() - since)
        numbers = [self.judge(must, shown) for must in step.must]
        self.steps.append(
            {
                **row,
                "status": status,
                "why": why,
                "seconds": round(shown.seconds, 1),
                "numbers": numbers,
                "medians": {name: {str(size): us for size, us in row.items()} for name, row in shown.medians.items()},
                "latency": shown.latency,
            }
        )
        print("\n".join(output.splitlines()[-12:]))
        print(f"{status} in {shown.seconds:.0f} s: {'; '.join(map(number_text, numbers))}", flush=True)

    def judge(self, must: Must, shown: Shown) -> dict[str, Any]:
        """A number beside what it must be; ``ok`` is None in a dry run."""
        value = must.read(shown)
        ok = None if self.dry else value is not None and value <= must.at_most
        return {"what": must.what, "unit": must.unit, "at_most": must.at_most, "value": value, "ok": ok}

    def results(self) -> dict[str, Any]:
        """All, for the file."""
        found = versions()
        if self.nccl_version is not None:
            found["NCCL"] = version_text(self.nccl_version)
        return {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "dry_run": self.dry,
            "machine": machine(),
            "versions": found,
            "steps": self.steps,
        }


def read(folder: Path, output: str, seconds: float) -> Shown:
    """What a step has left in its folder."""
    shown = Shown(seconds, output)
    if (kept := folder / "latency.json").exists():
        shown.latency = json.loads(kept.read_text())
    for case in figures(folder):
        for contender, median in case["median_us"].items():
            shown.medians.setdefault(contender, {})[case["bytes"]] = round(median, 1)
    return shown


def number_text(number: Mapping[str, Any]) -> str:
    """A number beside what it must be."""
    value = "not measured" if number["value"] is None else f"{number['value']:.3g} {number['unit']}".strip()
    word = {None: "", True: "", False: " NOT "}[number["ok"]]
    return f"{number['what']}: {value},{word} at most {number['at_most']:g}"


def main(words: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    every = range(1, len(STEPS) + 1)
    parser.add_argument("--steps", nargs="+", type=int, choices=every, default=every, help="only these steps")
    parser.add_argument("--nccl", metavar="LIBRARY", help="libnccl.so.2 of NCCL 2.30 or later")
    parser.add_argument("--dry-run", metavar="DRIVER", help="folder of the simulated driver")
    options = parser.parse_args(words)
    options.folder.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    whole = QuarterHour(options.folder.resolve(), options.nccl, options.dry_run)
    report = options.folder.resolve() / "quarter_hour.json"
    for number in sorted(options.steps):
        whole.run(number, STEPS[number - 1])
        # After each step, since the machine may go away.
        report.write_text(json.dumps(whole.results(), indent=1) + "\n")
    print(report)
    failed = [step for step in whole.steps if step["status"] in ("failed", "timed out")]
    missed = [number for step in whole.steps for number in step["numbers"] if number["ok"] is False]
    return 1 if failed or missed else 0


if __name__ == "__main__":
    sys.exit(main())
