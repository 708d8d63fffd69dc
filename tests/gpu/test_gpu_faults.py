"""Faults with tensors in GPU memory: the error, its time, and a GPU that never hangs.

Each test starts two ranks of fault_rank.py; ``DL_COMM_GPU_PATH`` is what the whole run is given.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from job import KIND
from launch import ending_together, launch

PROGRAM = Path(__file__).with_name("fault_rank.py")
TIMEOUT_S = 5
# Failures other than timeouts are reported within this many seconds.
SOON = 4
# Timeouts are reported within this many seconds after the deadline.
SLACK = 3


def run(case: str, folder: Path) -> tuple[dict[str, Any], str]:
    """Rank 0's results of a case, and the output."""
    # In memory, because pages of a file on a disk cannot be pinned for a GPU.
    with tempfile.TemporaryDirectory(dir=os.environ.get("DL_COMM_SHM_DIR", "/dev/shm")) as shm:
        return run_with(case, folder, Path(shm))


def run_with(case: str, folder: Path, shm: Path) -> tuple[dict[str, Any], str]:
    """The same, with the folder for shared memory."""
    command = ending_together([sys.executable, str(PROGRAM), case, str(folder)], folder, 2)
    settings = {"DL_COMM_TIMEOUT_S": str(TIMEOUT_S), "DL_COMM_STALL_WARN_S": "2", "DL_COMM_SHM_DIR": str(shm)}
    finished = launch(2, command, 100, settings)
    assert not finished.timed_out, finished.output
    assert not finished.left, finished.left
    assert not list(shm.iterdir())
    seen = json.loads((folder / "rank0.json").read_text())
    assert set(seen) == {"before 1000", "before 3000000", "call", "synchronize", "again", "finalize"}, finished.output
    for what in ("before 1000", "before 3000000", "finalize"):
        assert not seen[what]["error"], (seen[what], finished.output)
    return seen, finished.output


@pytest.mark.parametrize("size", ["short", "long"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_rank_that_is_killed(moment: str, size: str, tmp_path: Path) -> None:
    seen, output = run(f"killed_{moment}-{size}", tmp_path)
    assert seen["call"]["seconds"] < SOON, seen
    if moment == "before":
        assert seen["call"]["error"] == "PeerLostError", (seen, output)
        assert "rank 1 " in seen["call"]["text"], seen
    else:
        assert seen["call"]["error"] in ("", "PeerLostError"), (seen, output)
    # Returns soon; the tensors' contents are undefined.
    assert not seen["synchronize"]["error"], (seen, output)
    assert seen["synchronize"]["seconds"] < SOON, seen
    assert seen["again"]["error"] == "PeerLostError", (seen, output)
    assert "rank 1 " in seen["again"]["text"], seen
    assert seen["again"]["seconds"] < SOON, seen


def test_a_rank_that_misses_the_deadline(tmp_path: Path) -> None:
    seen, output = run("late-long", tmp_path)
    assert seen["call"]["error"] == "TimeoutError", (seen, output)
    assert TIMEOUT_S - 0.5 <= seen["call"]["seconds"] < TIMEOUT_S + SLACK, seen
    assert seen["synchronize"]["seconds"] < SOON, seen
    assert seen["again"]["error"] == "TimeoutError", (seen, output)


@pytest.mark.skipif(KIND == "cpu", reason="host memory has no stream that could be busy")
@pytest.mark.parametrize("size", ["short", "long"])
def test_a_gpu_that_is_busy_past_the_deadline(size: str, tmp_path: Path) -> None:
    seen, output = run(f"busy-{size}", tmp_path)
    assert not seen["synchronize"]["error"], (seen, output)
    assert seen["call"]["seconds"] + seen["synchronize"]["seconds"] < TIMEOUT_S + 9 + SLACK, seen
    assert seen["again"]["error"] == "TimeoutError", (seen, output)
