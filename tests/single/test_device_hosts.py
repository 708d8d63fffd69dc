"""Calls on device memory between hosts, on a stand-in for the CUDA driver: on the GPUs of a host, then in slices."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hosts import Hosts, possible
from launch import ending_together

pytestmark = pytest.mark.skipif(not possible(), reason="needs root and iproute2 to make network namespaces")

FOLDER = Path(__file__).parent.parent / "fake_gpu"


def env(fake_cuda: Path) -> dict[str, str]:
    return {"LD_LIBRARY_PATH": str(fake_cuda), "PYTHONPATH": str(FOLDER)}


@pytest.mark.parametrize(
    ("per_host", "path", "more"),
    [
        ([2, 2], "ipc+staged", {"FAKE_CUDA_DELAY_US": "300"}),
        ([2, 2], "ipc+staged", {"DL_COMM_PIPELINE_CHUNK_KB": "32", "DL_COMM_ALGORITHM": "pairwise"}),
        ([2, 1, 1], "ipc+staged", {"DL_COMM_PIPELINE_CHUNK_KB": "64", "FAKE_CUDA_NO_MEMOPS": "1"}),
        ([1, 1], "staged", {}),
    ],
    ids=str,
)
def test_results(fake_cuda: Path, per_host: list[int], path: str, more: dict[str, str]) -> None:
    with Hosts(len(per_host)) as hosts:
        command = [sys.executable, "-m", "pytest", "-x", "-q", str(FOLDER / "test_arrays.py")]
        finished = hosts.launch(per_host, command, 200, {**env(fake_cuda), "PATH_EXPECTED": path, **more})
    assert finished.returncode == 0, finished.output


LOST = """
import os, time
import numpy as np
from arrays import Array, Stream, use
import dl_comm

dl_comm.init()
use(0)
array = Array(np.ones(300000, "f4"), Stream())
dl_comm.gradients([array], out=[array])  # the way is found
array.get()
if dl_comm.rank() == 3:
    array.stream.sleep(1000)  # its neighbour has come to the call, and waits on its GPU
    dl_comm.gradients([array], out=[array])
    os.kill(os.getpid(), 9)
try:
    dl_comm.gradients([array], out=[array])
    array.get()  # the stream goes on
    dl_comm.gradients([array], out=[array])
    print("no error")
except dl_comm.PeerLostError as error:
    print("told:", error)
array.get()
dl_comm.finalize()
print("ended")
"""


def test_a_rank_that_is_lost_on_one_host_is_told_on_the_other(fake_cuda: Path, tmp_path: Path) -> None:
    script = tmp_path / "lost.py"
    script.write_text(LOST)
    with Hosts(2) as hosts:
        command = ending_together([sys.executable, str(script)], tmp_path, 4)
        finished = hosts.launch(2, command, 100, env(fake_cuda))
    assert not finished.timed_out, finished.output
    told = [line for line in finished.output.splitlines() if "told:" in line]
    assert len(told) == 3, finished.output
    assert all("rank 3" in line for line in told), finished.output
    assert finished.output.count("ended") >= 3, finished.output
