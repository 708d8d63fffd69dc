"""Messages of arrays in GPU memory with the fake CUDA driver: results on 1 to 3 ranks, other drivers, lost ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fake_cuda_env import PROGRAMS, environment
from hosts import Hosts, possible
from launch import ending_together, launch

SLOW = {"FAKE_CUDA_DELAY_US": "300"}
PATHS = {
    "ipc": {},
    "ipc between GPUs": {"FAKE_CUDA_DEVICES": "3"},
    "ipc, one queue": {"FAKE_CUDA_ONE_QUEUE": "1"},
    "ipc, calls that wait": {"FAKE_CUDA_WAITING_CALLS": "1"},
    "staged": {"FAKE_CUDA_NO_IPC": "1"},
    "staged by demand": {"DL_COMM_GPU_PATH": "staged"},
    "staged, no peer access": {"FAKE_CUDA_DEVICES": "3", "FAKE_CUDA_NO_PEERS": "1"},
}
COMMAND = [sys.executable, "-m", "pytest", "-x", "-q", str(PROGRAMS / "test_messages.py")]


def settings(path: str) -> dict[str, str]:
    return {**PATHS[path], **SLOW, "PATH_EXPECTED": path.split()[0].strip(",")}


@pytest.mark.parametrize(
    ("ranks", "path"),
    [(2, "ipc"), (2, "staged")]
    + [
        pytest.param(*each, marks=pytest.mark.heavy)
        for each in [(1, "ipc"), (1, "staged"), *((3, path) for path in PATHS)]
    ],
    ids=str,
)
def test_messages(fake_cuda: Path, ranks: int, path: str) -> None:
    finished = launch(ranks, COMMAND, 200, {**environment(fake_cuda), **settings(path)})
    assert finished.returncode == 0, finished.output
    assert not finished.left


@pytest.mark.skipif(not possible(), reason="needs root and iproute2 to make network namespaces")
def test_messages_between_hosts(fake_cuda: Path) -> None:
    with Hosts(2) as hosts:
        finished = hosts.launch([1, 1], COMMAND, 200, {**environment(fake_cuda), **settings("staged")})
    assert finished.returncode == 0, finished.output


LOST = """
import os, sys, time
import numpy as np
from arrays import Array, Stream, use
import dl_comm

folder, when = sys.argv[1:]
dl_comm.init()
use(0)
rank, array = dl_comm.rank(), Array(np.full(300_001, 1 + dl_comm.rank(), "f4"), Stream())

def reached(name):
    open(f"{folder}/{name}", "w").close()

def wait_for(name):
    while not os.path.exists(f"{folder}/{name}"):
        time.sleep(0.01)

def die():
    os.kill(os.getpid(), 9)

dl_comm.barrier()
error = "none"
try:
    if when == "before the receive":
        if rank == 1:
            dl_comm.send(array, 0, async_op=True)
            time.sleep(0.3)  # the message is announced
            die()
        while True:
            dl_comm.recv(array, 1, timeout=20)
    elif when == "in the receive":  # which waits for its own stream
        if rank == 1:
            work = dl_comm.send(array, 0, async_op=True)
            wait_for("receiving")
            time.sleep(0.3)
            die()
        array.stream.sleep(3000)
        work = dl_comm.recv(array, 1, timeout=20, async_op=True)
        reached("receiving")
        work.wait()
        dl_comm.recv(array, 1, timeout=20)
    elif when == "without a receive":
        if rank == 1:
            wait_for("sending")
            die()
        work = dl_comm.send(array, 1, timeout=20, async_op=True)
        reached("sending")
        work.wait()
    else:  # in the send, which waits for its own stream
        if rank == 1:
            wait_for("sending")
            die()
        array.stream.sleep(3000)
        work = dl_comm.send(array, 1, timeout=20, async_op=True)
        reached("sending")
        work.wait()
except dl_comm.PeerLostError as lost:
    error = str(lost)
print("reported:", error)
found = array.get()
assert (found == found[0]).all(), "whole or not at all"
dl_comm.finalize()
print("ended")
"""


@pytest.mark.parametrize("path", ["ipc", "staged"])
@pytest.mark.parametrize("when", ["before the receive", "in the receive", "without a receive", "in the send"])
def test_a_lost_rank_is_reported(fake_cuda: Path, tmp_path: Path, path: str, when: str) -> None:
    script = tmp_path / "lost.py"
    script.write_text(LOST)
    command = ending_together([sys.executable, str(script), str(tmp_path), when], tmp_path, 2)
    finished = launch(2, command, 60, {**environment(fake_cuda), **PATHS[path]})
    assert not finished.timed_out, finished.output
    assert "rank 1" in finished.output.split("reported:")[1].splitlines()[0], finished.output
    assert "ended" in finished.output, finished.output
