"""Faults in programs of torch.distributed: the error on every rank, its text, its time, and no leftovers.

``DL_COMM_TEST_ROUNDS`` repeats every case.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from c10d_helpers import GLOO, not_gloo

from imported import TORCH, python
from launch import launch
from ranks import free_port, start

SCENARIO = Path(__file__).with_name("c10d_scenario.py")
ROUNDS = int(os.environ.get("DL_COMM_TEST_ROUNDS", "1"))
# Failures are reported within this many seconds, far below the deadline, also on a busy machine.
SOON = 20
SETTINGS = {"DL_COMM_TIMEOUT_S": "100", "DL_COMM_MATCH_TIMEOUT_S": "3"}
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.parametrize("turn", range(ROUNDS), ids=lambda turn: f"{turn}" if ROUNDS > 1 else "-"),
]
Results = dict[str, dict[str, Any]]


class Job:
    """Three ranks of a scenario."""

    size = 3

    def __init__(self, folder: Path) -> None:
        self.folder, self.shm = folder, folder / "shm"
        self.shm.mkdir()

    def run(self, case: str, *, clean: bool = True, mpi: bool = False, size: int = 3, **settings: str) -> list[Results]:
        """Runs a case; returns the results of each rank. ``clean``: all exit with 0; ``mpi``: mpiexec starts them."""
        self.size = size
        command = [*python(*TORCH), str(SCENARIO), case, str(self.folder)]
        env = {**SETTINGS, "DL_COMM_SHM_DIR": str(self.shm), **settings}
        finished = launch(size, command, 120, env) if mpi else start(size, command, 120, env, grace=60)
        self.output = finished.output
        assert not finished.timed_out, finished.output
        assert not finished.left, finished.left
        assert not list(self.shm.iterdir()), finished.output
        if clean:
            assert finished.returncode == 0, finished.output
        files = [self.folder / f"rank{rank}.json" for rank in range(size)]
        return [json.loads(file.read_text()) if file.exists() else {} for file in files]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def succeed(results: list[Results], *names: str) -> None:
    """These cases have no error on any rank."""
    for rank, result in enumerate(results):
        for name in names or result:
            assert result[name]["error"] == "", (rank, name, result[name]["text"])


@not_gloo("does not compare the ranks' calls")
def test_mismatches_are_errors_on_every_rank(job: Job, turn: int) -> None:
    results = job.run("mismatches")
    succeed(results, "before", "between", "after", "after in the group")
    words = {
        "shape": ("6", "7"),
        "dtype": ("float32", "float64"),
        "op": ("sum", "max"),
        "root": ("rank 0", "rank 1"),
        "call": ("gather", "scatter"),
        "group": ("2", "3"),
    }
    for case, expected in words.items():
        for rank, result in enumerate(results):
            assert result[case]["error"] == "DistBackendError", (case, rank, result[case])
            text = result[case]["text"].lower()
            for word in expected:
                assert word in text, (case, rank, text)
            assert result[case]["seconds"] < SOON, (case, rank, result[case])
    name = job.output.partition("the group's name is ")[2].splitlines()[0]
    for result in results:
        assert name in result["group"]["text"] or "readers" in result["group"]["text"], (name, result["group"]["text"])


def test_a_rank_ends_in_backward(job: Job, turn: int) -> None:
    results = job.run("backward", clean=False)
    succeed(results, "step")
    for result in results[:-1]:
        assert result["lost"]["error"] == ("RuntimeError" if GLOO else "DistBackendError"), result["lost"]
        assert result["lost"]["seconds"] < SOON
        assert GLOO or "rank 2" in result["lost"]["text"], result["lost"]["text"]
        assert result["next"]["error"], "the default group is lost"
        assert result["next"]["seconds"] < SOON


@not_gloo("names nobody")
def test_the_deadline_of_the_group(job: Job, turn: int) -> None:
    results = job.run("late", clean=False)
    for result in results[:-1]:
        assert result["late"]["error"] == "DistBackendError", result["late"]
        assert 3 < result["late"]["seconds"] < 11, result["late"]
        assert "rank 2" in result["late"]["text"], result["late"]["text"]
        assert "the timeout of its group" in result["late"]["text"], result["late"]["text"]
        assert "DL_COMM_TIMEOUT_S" not in result["late"]["text"], result["late"]["text"]


@not_gloo("names nobody")
def test_the_deadline_of_a_message(job: Job, turn: int) -> None:
    results = job.run("late_receive", clean=False)
    for result in results[:-1]:
        assert "the timeout of its group" in result["late"]["text"], result["late"]


@not_gloo("has the timeout of torch")
def test_the_file_of_the_store_is_removed(job: Job, turn: int) -> None:
    results = job.run("file_gone", clean=True)
    succeed(results)
    for result in results:
        assert result["finalize"]["seconds"] < 3, result


@not_gloo("names nobody")
def test_the_deadline_of_a_wait(job: Job, turn: int) -> None:
    results = job.run("late_wait", clean=False)
    for result in results[:-1]:
        assert result["late"]["error"] == "DistBackendError", result["late"]
        assert 0.9 < result["late"]["seconds"] < 4.5, result["late"]
        assert "rank 2" in result["late"]["text"] or "1 s" in result["late"]["text"], result["late"]["text"]


def test_an_absent_rank(job: Job, turn: int) -> None:
    results = job.run("absent", clean=False)
    for result in results[:-1]:
        assert result["absent"]["error"], result
        assert result["absent"]["seconds"] < 14, result["absent"]


def test_debug_mode(job: Job, turn: int) -> None:
    succeed(job.run("debug", TORCH_DISTRIBUTED_DEBUG="DETAIL"))


def test_a_script_that_never_destroys(job: Job, turn: int) -> None:
    for size in (1, 3):
        succeed(job.run("never_destroys", size=size))


@not_gloo("a forked child that calls it hangs")
def test_forked_children(job: Job, turn: int) -> None:
    succeed(job.run("loader"))


@pytest.mark.heavy
def test_a_slow_rank_is_waited_for(job: Job, turn: int) -> None:
    succeed(job.run("stopped", TORCH_SHOW_CPP_STACKTRACES="0"))


@not_gloo("runs no job of dl_comm")
def test_other_ranks_than_those_of_the_job(job: Job, turn: int) -> None:
    results = job.run(
        "wrong_rank", clean=False, mpi=True, size=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())
    )
    succeed(results, "own")
    for rank, result in enumerate(results):
        for case in ("rank", "size"):
            assert result[case]["error"], (rank, case)
            assert "rank" in result[case]["text"], (rank, result[case]["text"])
