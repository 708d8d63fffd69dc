"""Faults in every binding, on one host and on two: the error, its text, its time, and no leftovers.

``DL_COMM_TEST_ROUNDS`` repeats every case.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hosts
from imported import TORCH, python
from launch import QUIET, Finished, ending_together, launch, mpiexec, run

SCENARIO = Path(__file__).with_name("scenario.py")
ROUNDS = int(os.environ.get("DL_COMM_TEST_ROUNDS", "1"))
# Failures are reported within this many seconds, far below the deadline, also on a busy machine.
SOON = 10
SETTINGS = {
    "DL_COMM_TIMEOUT_S": "60",
    "DL_COMM_STALL_WARN_S": "0.5",
    "DL_COMM_MATCH_TIMEOUT_S": "6",
}
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(params=["numpy", "torch", "tensorflow"])
def binding(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(request.param)
    return str(request.param)


def program(binding: str, there: hosts.Hosts | None = None) -> list[str]:
    """An interpreter that has imported the framework; on other hosts a new one, which belongs to them."""
    modules = {"torch": TORCH, "tensorflow": ("tensorflow",)}.get(binding)
    return [sys.executable] if modules is None or there is not None else python(*modules)


class Job:
    """Ranks of a scenario, on one host or on two."""

    def __init__(self, binding: str, there: hosts.Hosts | None, folder: Path) -> None:
        self.binding, self.there, self.folder = binding, there, folder
        self.size = 3 if there is None else 4
        self.odd = self.size - 1
        self.shm = folder / "shm"
        self.shm.mkdir()

    def run(self, case: str, *, together: bool = False, **settings: str) -> Finished:
        """Runs ``case``; with ``together`` the launcher kills no rank until all have ended."""
        env = {**SETTINGS, "DL_COMM_SHM_DIR": str(self.shm), **settings}
        command = [*program(self.binding, self.there), str(SCENARIO), self.binding, case, str(self.folder)]
        if together:
            command = ending_together(command, self.folder, self.size)
        if self.there is None:
            finished = launch(self.size, command, 120, env)
        else:
            finished = self.there.launch(2, command, 120, env)
        assert not finished.timed_out, finished.output
        assert not finished.left, finished.left
        assert not list(self.shm.iterdir())
        return finished

    def results(self, rank: int) -> dict[str, dict[str, Any]]:
        results: dict[str, dict[str, Any]] = json.loads((self.folder / f"rank{rank}.json").read_text())
        return results

    def others(self) -> list[dict[str, dict[str, Any]]]:
        return [self.results(rank) for rank in range(self.size) if rank != self.odd]


@pytest.fixture(scope="module", params=["one host", "two hosts"])
def there(request: pytest.FixtureRequest) -> Iterator[hosts.Hosts | None]:
    if request.param == "one host":
        yield None
    elif not hosts.possible():
        pytest.skip("needs root, iproute2 and network namespaces")
    else:
        with hosts.Hosts(2) as made:
            yield made


@pytest.fixture
def job(binding: str, there: hosts.Hosts | None, tmp_path: Path) -> Job:
    return Job(binding, there, tmp_path)


@pytest.fixture(params=range(ROUNDS), autouse=True)
def _round(request: pytest.FixtureRequest) -> None:
    """Repeats every test."""


def test_mismatched_calls(job: Job) -> None:
    finished = job.run("recoverable")
    assert finished.returncode == 0, finished.output
    both = {
        "shape": ("'shape'", "float32[5]", "float32[4]"),
        "dtype": ("'dtype'", "float64[4]", "float32[4]"),
        "root": ("from rank 0", "from rank 1"),
    }
    for rank in range(job.size):
        results = job.results(rank)
        for case, words in both.items():
            assert results[case]["error"] == "MismatchError", results[case]
            assert results[case]["seconds"] < SOON, results[case]
            assert f"rank {job.odd}: " in results[case]["text"], results[case]
            assert all(word in results[case]["text"] for word in words), results[case]
        alone = ("early", "extra") if rank == job.odd else ("missing", "late")
        for case in alone:
            assert results[case]["error"] == "MismatchError", results[case]
            pair = ("'missing'", "'next'") if case in ("early", "missing") else ("'extra'", "'last'")
            assert all(word in results[case]["text"] for word in pair), results[case]
        for case in ("after", "order first", "order other", "next", "last", "fork"):
            assert not results[case]["error"], results[case]


def test_late_ranks(job: Job) -> None:
    # The launcher's status after a stopped rank does not matter.
    finished = job.run("stalls", together=True)
    for rank in range(job.size):
        results = job.results(rank)
        assert set(results) == {"before", "slow", "gil", "stopped"}, finished.output
        assert not any(each["error"] for each in results.values()), results
    # Instead of an error, a line named the late rank and the call.
    for case in ("slow", "gil", "stopped"):
        words = rf"average '{case}' on team 0 \(tensor 0.*: float32\[1\]\) has waited \d+ s for .*rank {job.odd} on "
        assert re.search(words, finished.output), (case, finished.output)
    for rank in range(job.size - 1):
        assert job.results(rank)["slow"]["seconds"] > 1


@pytest.mark.parametrize(
    ("case", "how"),
    [
        ("sigkill", "killed by signal 9"),
        ("sigsegv", "killed by signal 11"),
        ("exit0", "exit status 0"),
        ("exception", ""),
    ],
)
def test_a_lost_rank(job: Job, case: str, how: str) -> None:
    finished = job.run(case, together=True)
    assert finished.returncode != 0, finished.output
    others = job.others()
    for results in others:
        assert results["lost"]["error"] == "PeerLostError", results["lost"]
        assert results["lost"]["seconds"] < SOON, results["lost"]
        assert f"rank {job.odd} " in results["lost"]["text"], results["lost"]
        assert "(pid " in results["lost"]["text"], results["lost"]
        # Repeats the first error.
        assert (results["again"]["error"], results["again"]["text"]) == (
            results["lost"]["error"],
            results["lost"]["text"],
        )
        assert results["again"]["seconds"] < SOON
        assert not results["finalize"]["error"], results["finalize"]
    if how and job.there is None:
        assert any(how in results["lost"]["text"] for results in others)


def test_a_rank_that_misses_the_deadline(job: Job) -> None:
    # After a timeout ranks exit without MPI_Finalize, so the launcher must not kill the last one.
    finished = job.run("late", together=True)
    statuses = [file.read_text() for file in job.folder.glob("ended.*")]
    assert statuses == ["0\n"] * job.size, finished.output
    for results in job.others():
        assert results["late"]["error"] == "TimeoutError", results["late"]
        assert 2 <= results["late"]["seconds"] < 2 + SOON, results["late"]
        assert f"rank {job.odd} on" in results["late"]["text"] or f"{job.odd})" in results["late"]["text"], results[
            "late"
        ]
        assert "'late'" in results["late"]["text"], results["late"]
        assert results["again"]["error"] == results["late"]["error"], results["again"]
    assert all(not job.results(rank)["finalize"]["error"] for rank in range(job.size))
    # The late rank gets the reason of the team's failure.
    assert job.results(job.odd)["again"]["error"] == "TimeoutError", job.results(job.odd)


def test_a_launcher_that_kills_ranks(binding: str, tmp_path: Path) -> None:
    for case in ("sigkill", "sigsegv", "exit0", "exception"):
        command = [*program(binding), str(SCENARIO), binding, case, str(tmp_path)]
        if case == "exit0":
            # MPICH's mpiexec kills the others and reports success.
            finished = run([sys.executable, "-m", "dl_comm.run", "-n", "2", *command], 60, QUIET)
        else:
            finished = launch(2, command, 60)
        assert finished.returncode != 0, (case, finished.output)
        assert not finished.left, case


def test_a_killed_rank_leaves_nothing_of_mpi_behind(binding: str, tmp_path: Path) -> None:
    if not hosts.possible():
        pytest.skip("needs root")
    # A separate /dev/shm, which no other process uses.
    script = 'mount -t tmpfs tmpfs /dev/shm; "$@"; ls -A /dev/shm > "$LISTING"'
    command = [sys.executable, str(SCENARIO), binding, "sigkill", str(tmp_path)]
    inside = ["unshare", "--mount", "bash", "-c", script, "inside", *mpiexec(), "-n", "3", *command]
    finished = run(inside, 60, {**QUIET, "LISTING": str(tmp_path / "listing")})
    assert not finished.timed_out, finished.output
    assert (tmp_path / "listing").read_text() == "", finished.output


def test_too_little_shared_memory(job: Job, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    tiny = tmp_path / "tiny"
    tiny.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tiny)], check=True)
    try:
        finished = job.run("work", together=True, DL_COMM_SHM_DIR=str(tiny))
        assert finished.returncode != 0
        errors = [json.loads(file.read_text()) for file in job.folder.glob("start*.json")]
        assert len(errors) == job.size, finished.output
        assert {error for error, _ in errors} == {"CommError"}, errors
        assert all(re.search(r"\d+ KiB.*DL_COMM_SHM_DIR", text) for _, text in errors), errors
    finally:
        subprocess.run(["umount", "-l", str(tiny)], check=True)


def test_a_segment_that_a_crash_left(job: Job) -> None:
    left = job.shm / f"dl_comm.{7:032x}"
    left.write_bytes(b"left")
    hour_ago = time.time() - 3600
    os.utime(left, (hour_ago, hour_ago))
    finished = job.run("work")  # checks that the folder is empty afterwards
    assert finished.returncode == 0, finished.output


def test_two_concurrent_jobs(binding: str, there: hosts.Hosts | None, tmp_path: Path) -> None:
    jobs = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        jobs.append(Job(binding, there, folder))
        jobs[-1].shm = tmp_path / "shm"
    (tmp_path / "shm").mkdir(exist_ok=True)
    done: list[Finished] = []

    def start(job: Job) -> None:
        env = {**SETTINGS, "DL_COMM_SHM_DIR": str(job.shm)}
        command = [*program(job.binding, there), str(SCENARIO), job.binding, "work", str(job.folder)]
        done.append(launch(job.size, command, 120, env) if there is None else there.launch(2, command, 120, env))

    threads = [threading.Thread(target=start, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [finished.returncode for finished in done] == [0, 0], done
    for job in jobs:
        assert all(not job.results(rank)["work"]["error"] for rank in range(job.size))
    assert not list((tmp_path / "shm").iterdir())
