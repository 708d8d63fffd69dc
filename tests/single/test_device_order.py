"""Calls of several groups on NCCL start on each GPU in the order of their submission, with the fake driver and NCCL."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fake_cuda_env import environment
from launch import launch

HEAD = """
import sys, threading, time
import numpy as np
from arrays import Array, Stream, use
from device_calls import DeviceGroup, DeviceWork
import dl_comm
from dl_comm._base.cuda import preload

dl_comm.init()
preload()  # as the bindings do
rank, size = dl_comm.rank(), dl_comm.size()
use(rank)
ALLREDUCE, FLOAT32 = 1, 2

class Tensor:
    def __init__(self, members, name):
        self.members, self.group, self.stream = members, DeviceGroup(members, name), Stream()
        self.array = Array(np.full(100, 1.0, "f4"), self.stream)

    def start(self, timeout=20.0):
        buffer = (self.array.address.value, self.array.address.value, 100, FLOAT32)
        where = (rank, self.stream.handle.value)
        return DeviceWork(ALLREDUCE, [buffer], where, group=self.group, timeout=timeout)

    def check(self, calls):
        assert (self.array.get() == float(len(self.members)) ** calls).all(), (calls, self.array.get()[0])
        self.array.put(np.full(100, 1.0, "f4"))
"""

# All ranks start the calls of their groups in the same order. Each group has its own thread, so the calls come to
# the GPU's only queue in any order, unless something orders them.
STEADY = (
    HEAD
    + """
everyone = list(range(size))
subsets = {"all": everyone, "first": everyone[:2], "last": everyone[-2:]}
groups = [Tensor(members, name) for name, members in subsets.items() if rank in members]
for tensor in groups:
    assert tensor.start().wait() == 0
    tensor.check(1)
for round in range(int(sys.argv[1])):
    calls = 1 + (round % 3 == 0)
    works = [tensor.start() for _ in range(calls) for tensor in groups]
    assert not any(work.wait() for work in works), round
    if round % 5 == 0:
        [tensor.check(calls) for tensor in groups]
    else:
        [tensor.array.put(np.full(100, 1.0, "f4")) for tensor in groups]
dl_comm.synchronize()
[tensor.group.free() for tensor in groups]
dl_comm.finalize()
print(f"rank {rank} has made {sys.argv[1]} rounds\\n", end="")
"""
)


@pytest.mark.parametrize(
    ("ranks", "rounds"), [(2, 200), (3, 200), pytest.param(3, 10_000, marks=pytest.mark.heavy)], ids=str
)
def test_groups_on_one_queue(fake_cuda: Path, tmp_path: Path, ranks: int, rounds: int) -> None:
    script = tmp_path / "order.py"
    script.write_text(STEADY)
    settings = {
        "FAKE_CUDA_DEVICES": str(ranks),
        "FAKE_CUDA_ONE_QUEUE": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "DL_COMM_GPU_PATH": "nccl",
    }
    env = {**environment(fake_cuda), **settings}
    finished = launch(ranks, [sys.executable, str(script), str(rounds)], 120 + rounds / 5, env)
    assert finished.returncode == 0, finished.output
    assert finished.output.count("has made") == ranks, finished.output


# The ranks start calls of two groups in opposite orders: what is agreed on first differs, and no agreement may wait
# for a launch. The GPUs have a queue for each stream, as NCCL demands of such a program.
CROSSED = (
    HEAD
    + """
one, two = Tensor(list(range(size)), "one"), Tensor(list(range(size)), "two")
for tensor in (one, two):
    assert tensor.start().wait() == 0
    tensor.check(1)
for round in range(30):
    works = [tensor.start() for tensor in ((one, two) if rank == 0 else (two, one)) for _ in range(3)]
    assert not any(work.wait() for work in works), round
    [tensor.check(3) for tensor in (one, two)]
print(f"rank {rank}: crossed\\n", end="")
# A rank that waits for the second call before it makes the first.
first = one.start() if rank == 0 else None
assert two.start().wait() == 0
two.check(1)
assert (first or one.start()).wait() == 0
one.check(1)
# A call that the other ranks do not make, and that ends, does not hold up those behind it.
if rank == 0:
    lone = one.start(timeout=1.0)
behind = two.start()
assert behind.wait() == 0
if rank == 0:
    assert lone.wait() in (-4, -5, -6), lone.status
two.check(1)
dl_comm.finalize()
print(f"rank {rank}: behind\\n", end="")
"""
)


def test_calls_in_opposite_orders_are_agreed_on(fake_cuda: Path, tmp_path: Path) -> None:
    script = tmp_path / "crossed.py"
    script.write_text(CROSSED)
    settings = {"FAKE_CUDA_DEVICES": "2", "DL_COMM_GPU_PATH": "nccl", "DL_COMM_MATCH_TIMEOUT_S": "10"}
    finished = launch(2, [sys.executable, str(script)], 100, {**environment(fake_cuda), **settings})
    assert finished.returncode == 0, finished.output
    assert "make the calls of all groups in the same order" in finished.output, finished.output
    assert finished.output.count("crossed") == finished.output.count("behind") == 2, finished.output
