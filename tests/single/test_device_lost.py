"""Calls on GPU memory that are lost after they were enqueued, with the fake CUDA driver and NCCL: never silently."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from fake_cuda_env import environment
from launch import Finished, ending_together, launch

# Rank 1's GPU is busy beyond the deadline, or until the rank ends. The calls of both ranks are enqueued by then.
PROGRAM = """
import os, sys, time
import numpy as np
from arrays import Array, Stream, use
from device_calls import DeviceWork
from fake import alloc_async
import dl_comm

length, how, end = int(sys.argv[1]), sys.argv[2], sys.argv[3]
if end == "no handler":
    dl_comm.rc.exit_handler = False
dl_comm.init()
rank = dl_comm.rank()
gpu = rank % int(os.environ["FAKE_CUDA_DEVICES"])
use(gpu)
stream = Stream()
# NCCL has no means of integers.
kinds = ((length, "f4"), (3, "f2"), (2, "f8")) + (() if os.environ["FAKE_CUDA_DEVICES"] == "2" else ((5, "i4"),))
def memory(values):
    return Array(values, stream, alloc_async(values.nbytes) if os.environ.get("POOL") else None)

arrays = [memory(np.full(n, 1 + rank, t)) for n, t in kinds]
apart, joined = memory(np.zeros(length, "f4")), memory(np.zeros(2 * length, "f4"))

def start(collective, out):
    return DeviceWork(collective, [(arrays[0].address.value, out.address.value, length, 2)], (gpu, stream.handle.value))

for _ in range(2):  # chooses the path, and may compile the kernels
    dl_comm.gradients(arrays, out=arrays)
    assert start(1, apart).wait() == 0
    assert start(5, joined).wait() == 0  # an all-gather
assert arrays[0].get()[0] == 1.5
dl_comm.synchronize()
dl_comm.write_on_rank0(sys.argv[4] + "/kept", lambda path: path.write_text("before"))
for array in arrays:
    array.put(np.full(array.host.shape, 1 + rank, array.host.dtype))
if how == "late":
    dl_comm.set_timeout(1)
if rank == 1:
    stream.sleep(2500 if how == "late" else 60000)
dl_comm.gradients(arrays, out=arrays)
work, gathering = start(1, apart), start(5, joined)
assert work.ended() == 0
assert gathering.ended() == 0
if how == "gone":
    open(sys.argv[4] + f"/enqueued{rank}", "w").close()
    while rank == 1 and not os.path.exists(sys.argv[4] + "/enqueued0"):
        time.sleep(0.01)
    if rank == 1:
        os.kill(os.getpid(), 9)
found = [array.get() for array in (*arrays, apart, joined)]
print(f"all NaN: {[bool(np.isnan(array).all()) for array in found if array.dtype.kind == 'f']}\\n", end="")
def report(name, action):
    try:
        action()
    except dl_comm.CommError as error:
        print(f"{name}: {type(error).__name__} {'are not valid' in str(error)}\\n", end="")
    else:
        print(f"{name}: no error\\n", end="")
if end == "all":
    print(f"handle: {work.wait()}\\n", end="")
    report("synchronize", dl_comm.synchronize)
    report("write", lambda: dl_comm.write_on_rank0(sys.argv[4] + "/kept", lambda path: path.write_text("after")))
    print(f"kept: {open(sys.argv[4] + '/kept').read()}\\n", end="")
    report("finalize", dl_comm.finalize)
    report("finalize again", dl_comm.finalize)
elif end == "next call":
    report("next call", lambda: dl_comm.gradients(arrays, out=arrays))
    report("finalize", dl_comm.finalize)
elif end == "finalize":
    report("finalize", dl_comm.finalize)
"""

PATHS = {
    "ipc": {"FAKE_CUDA_DEVICES": "1"},
    # The memory has no handle for other processes.
    "ipc in chunks": {"FAKE_CUDA_DEVICES": "1", "POOL": "1"},
    "nccl": {"FAKE_CUDA_DEVICES": "2"},
}


def lose(fake_cuda: Path, folder: Path, path: str, length: int, how: str, end: str) -> Finished:
    script = folder / "lost.py"
    script.write_text(PROGRAM)
    command = ending_together([sys.executable, str(script), str(length), how, end, str(folder)], folder, 2)
    env = {**environment(fake_cuda), **PATHS[path], "DL_COMM_TIMEOUT_S": "60"}
    finished = launch(2, command, 100, env)
    assert not finished.timed_out, finished.output
    line = r"^dl_comm: .*; the results of .*, which (rank \d).* had enqueued, are not valid"
    lines = re.findall(line, finished.output, re.M)
    assert sorted(lines) == (["rank 0", "rank 1"] if how == "late" else ["rank 0"]), finished.output
    ranks = len(lines)
    assert finished.output.count("all NaN: [True, True, True, True, True]") == ranks, finished.output
    return finished


def reports(finished: Finished, name: str) -> set[str]:
    return set(re.findall(rf"^{name}: (.*)$", finished.output, re.M))


@pytest.mark.parametrize(
    ("path", "length", "how", "error"),
    [
        ("ipc", 1000, "late", "TimeoutError"),
        ("ipc in chunks", 600_000, "late", "TimeoutError"),
        ("nccl", 600_000, "late", "TimeoutError"),
        ("ipc", 600_000, "gone", "PeerLostError"),
        ("nccl", 1000, "gone", "PeerLostError"),
    ],
)
def test_everything_that_asks_reports_the_loss(
    fake_cuda: Path, tmp_path: Path, path: str, length: int, how: str, error: str
) -> None:
    finished = lose(fake_cuda, tmp_path, path, length, how, "all")
    assert reports(finished, "handle") == {str(-5 if how == "late" else -6)}, finished.output
    for name in ("synchronize", "write"):
        assert reports(finished, name) == {f"{error} True"}, finished.output
    assert reports(finished, "kept") == {"before"}, finished.output
    # It has been reported.
    assert reports(finished, "finalize") == {"no error"}, finished.output
    if how == "late":
        assert finished.returncode == 0, finished.output


@pytest.mark.parametrize(("path", "length"), [("ipc", 600_000), ("nccl", 1000)])
def test_finalize_reports_the_loss_of_the_last_call(fake_cuda: Path, tmp_path: Path, path: str, length: int) -> None:
    finished = lose(fake_cuda, tmp_path, path, length, "late", "finalize")
    assert reports(finished, "finalize") == {"TimeoutError True"}, finished.output
    assert finished.returncode != 0, finished.output


@pytest.mark.parametrize(("path", "end"), [("ipc", "exit"), ("nccl", "no handler")])
def test_a_program_that_does_not_ask_ends_with_a_status(fake_cuda: Path, tmp_path: Path, path: str, end: str) -> None:
    finished = lose(fake_cuda, tmp_path, path, 1000, "late", end)
    assert finished.returncode != 0, finished.output


def test_the_next_call_reports_the_loss(fake_cuda: Path, tmp_path: Path) -> None:
    finished = lose(fake_cuda, tmp_path, "ipc", 1000, "late", "next call")
    # It names the loss if this rank has seen to it; another one may have released the stream a moment ago.
    found = reports(finished, "next call")
    assert found, finished.output
    assert found <= {"TimeoutError True", "TimeoutError False"}, finished.output
    assert reports(finished, "finalize") == {"no error"}, finished.output
    assert finished.returncode == 0, finished.output


GRAPH = """
import os, sys, time
import numpy as np
from arrays import Array, Graph, Stream, use
import dl_comm

dl_comm.init()
rank, folder = dl_comm.rank(), sys.argv[1]
use(rank)
stream = Stream()
array, out = (Array(np.full(1000, value, "f4"), stream) for value in (1 + rank, 0))
dl_comm.gradients([array], out=[out])  # chooses the path
stream.capture(True)
dl_comm.gradients([array], out=[out])
graph = Graph(stream)
out.put(np.zeros(1000, "f4"))
graph.launch(stream)
assert (out.get() == 1.5).all()
if rank == 1:
    stream.sleep(60000)
graph.launch(stream)
open(f"{folder}/enqueued{rank}", "w").close()
while rank == 1 and not os.path.exists(f"{folder}/enqueued0"):
    time.sleep(0.01)
if rank == 1:
    os.kill(os.getpid(), 9)
print("NaN:", bool(np.isnan(out.get()).all()))
if sys.argv[2] == "finalize":
    try:
        dl_comm.finalize()
    except dl_comm.PeerLostError as error:
        print("finalize:", "are not valid" in str(error))
"""


@pytest.mark.parametrize("end", ["finalize", "exit"])
def test_a_replay_of_a_graph_without_a_rank_leaves_nan(fake_cuda: Path, tmp_path: Path, end: str) -> None:
    script = tmp_path / "graph.py"
    script.write_text(GRAPH)
    command = ending_together([sys.executable, str(script), str(tmp_path), end], tmp_path, 2)
    finished = launch(2, command, 100, {**environment(fake_cuda), **PATHS["nccl"], "DL_COMM_TIMEOUT_S": "60"})
    assert not finished.timed_out, finished.output
    assert "NaN: True" in finished.output, finished.output
    assert re.search(r"in a GPU graph, which rank 0.* had enqueued, are not valid", finished.output), finished.output
    assert end != "finalize" or "finalize: True" in finished.output, finished.output
    statuses = {path.read_text().strip() for path in tmp_path.glob("ended.*")}
    # Also after finalize, which a rank has not reached.
    assert "137" in statuses
    assert "0" not in statuses, (statuses, finished.output)
