"""Calls on device memory between hosts, with a fake CUDA driver."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from fake_cuda_env import PROGRAMS, environment
from hosts import Hosts, possible
from launch import ending_together

pytestmark = pytest.mark.skipif(not possible(), reason="needs root and iproute2 to make network namespaces")


def heavy(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.heavy)


def run(fake_cuda: Path, per_host: list[int], program: str, settings: dict[str, str]) -> None:
    """Run a file of tests on so many ranks of each host."""
    with Hosts(len(per_host)) as hosts:
        command = [sys.executable, "-m", "pytest", "-x", "-q", str(PROGRAMS / program)]
        finished = hosts.launch(per_host, command, 300, {**environment(fake_cuda), **settings})
    assert finished.returncode == 0, finished.output


@pytest.mark.parametrize(
    ("per_host", "path", "more"),
    [
        heavy([2, 2], "ipc+staged", {"FAKE_CUDA_DELAY_US": "300"}),
        heavy([3, 2], "ipc+staged", {"DL_COMM_PIPELINE_CHUNK_KB": "32", "DL_COMM_ALGORITHM": "pairwise"}),
        heavy([2, 2, 2], "ipc+staged", {"DL_COMM_PIPELINE_CHUNK_KB": "64", "FAKE_CUDA_NO_MEMOPS": "1"}),
        heavy([2, 1], "ipc+staged", {"DL_COMM_ALGORITHM": "ring"}),
        heavy([1, 1], "staged", {}),
    ],
    ids=str,
)
def test_results(fake_cuda: Path, per_host: list[int], path: str, more: dict[str, str]) -> None:
    run(fake_cuda, per_host, "test_arrays.py", {"PATH_EXPECTED": path, **more})


@pytest.mark.parametrize(
    ("per_host", "path", "more"),
    [
        heavy([2, 2], "ipc+staged", {}),
        heavy([3, 2], "ipc+staged", {"DL_COMM_PIPELINE_CHUNK_KB": "32"}),
        heavy([1, 1], "staged", {"FAKE_CUDA_DELAY_US": "300"}),
        heavy([1, 1], "staged", {}),
    ],
    ids=str,
)
def test_collectives(fake_cuda: Path, per_host: list[int], path: str, more: dict[str, str]) -> None:
    run(fake_cuda, per_host, "test_collectives.py", {"PATH_EXPECTED": path, **more})


LOST = """
import os, time
import numpy as np
from arrays import Array, Stream, use
from device_calls import blocking_device_call
import dl_comm

dl_comm.init()
use(0)
array = Array(np.ones(300000, "f4"), Stream())
waits = os.environ["WAITS"] == "1"

def average(name):
    if waits:
        code = blocking_device_call(array.address.value, 300000, 0, array.stream.handle.value, name)
        return "" if code == 0 else f"code {code}"
    try:
        dl_comm.gradients([array], out=[array], name=name)
        array.get()  # the stream continues
        dl_comm.gradients([array], out=[array])
        return ""
    except dl_comm.PeerLostError as error:
        return str(error)

assert average("first") == ""  # selects the path
if dl_comm.rank() == 3:
    array.stream.sleep(1000)  # the other rank has made the call and waits on its GPU
    if waits:
        time.sleep(0.5)
    else:
        dl_comm.gradients([array], out=[array], name="second")
    os.kill(os.getpid(), 9)
error = average("second")
print(f"reported: {error}\\n", end="")
array.get()
dl_comm.finalize()
print("ended\\n", end="")
"""


@pytest.mark.parametrize("waits", ["0", heavy("1")])
def test_a_lost_rank_is_reported_on_the_other_host(fake_cuda: Path, tmp_path: Path, waits: str) -> None:
    script = tmp_path / "lost.py"
    script.write_text(LOST)
    with Hosts(2) as hosts:
        command = ending_together([sys.executable, str(script)], tmp_path, 4)
        finished = hosts.launch(2, command, 100, {**environment(fake_cuda), "WAITS": waits})
    assert not finished.timed_out, finished.output
    lines = [line for line in finished.output.splitlines() if "reported:" in line]
    assert len(lines) == 3, finished.output
    assert all(("code -6" if waits == "1" else "rank 3") in line for line in lines), finished.output
    assert finished.output.count("ended\n") >= 3, finished.output
