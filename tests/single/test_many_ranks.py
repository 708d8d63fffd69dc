"""Many ranks on one host: they start and work where they outnumber the processors, and where flags take a tree.

The tree is for ranks with processors of their own; here a setting makes ranks that share them take it, too.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from launch import Finished, ending_together, launch

PROGRAM = """
import os, signal, sys, time
import numpy as np, dl_comm
dl_comm.init()
rank, size = dl_comm.rank(), dl_comm.size()
for length in (1, 700, 70_000, 300_000):
    values = np.arange(length, dtype=np.int64) + rank
    total = dl_comm.allreduce(values, op="sum")
    assert (total == size * np.arange(length) + size * (size - 1) // 2).all(), length
    root = length % size
    assert (dl_comm.broadcast(values.copy(), root=root) == np.arange(length) + root).all(), length
    block = dl_comm.all_gather(values[:700])
    assert (block.reshape(size, -1) == np.arange(min(length, 700)) + np.arange(size)[:, None]).all(), length
    works = [dl_comm.allreduce(values + number, async_op=True) for number in range(3)]
    for number, work in enumerate(works):
        assert work.wait()[0] == size * number + size * (size - 1) // 2
for _ in range(300):
    dl_comm.allreduce(np.ones(4, np.float32), op="sum")
try:
    dl_comm.allreduce(np.ones(3 if rank == size - 1 else 2, np.float32), op="sum")
    sys.exit("a different call was not noticed")
except dl_comm.MismatchError:
    pass
assert dl_comm.allreduce(np.ones(2, np.float32), op="sum")[0] == size
with open("/proc/self/status") as status:
    lines = dict(line.split(":", 1) for line in status)
if rank == size - 1:
    print("memory", *(lines[name].split()[0] for name in ("RssAnon", "RssShmem")), flush=True)
if "end" in sys.argv:
    dl_comm.finalize()
    sys.exit()
# The first rank of the second subtree is lost: all others hear of it.
if rank == 8:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        dl_comm.allreduce(np.ones(4, np.float32), op="sum")
except dl_comm.PeerLostError as error:
    assert "rank 8" in str(error), error
    os.write(1, b"heard\\n")
"""
TREE = {"DL_COMM_SELECTION": "notices.flat_shared_cpus=15"}


def run(folder: Path, ranks: int, tree: bool, *words: str) -> Finished:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    env = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **(TREE if tree else {})}
    finished = launch(ranks, ending_together([sys.executable, str(program), *words], folder, ranks), 240, env)
    assert not finished.timed_out, finished.output
    return finished


@pytest.mark.heavy
@pytest.mark.parametrize(("ranks", "tree"), [(32, False), (64, False), (64, True)])
def test_ranks_that_outnumber_the_processors_work(tmp_path: Path, ranks: int, tree: bool) -> None:
    finished = run(tmp_path, ranks, tree, "end")
    assert finished.returncode == 0, finished.output
    found = re.search(r"memory (\d+) (\d+)", finished.output)
    assert found, finished.output
    own, shared = (int(kib) >> 10 for kib in found.groups())
    # NumPy and the interpreter take 30 MiB; each rank reads the slots of all.
    assert own < 80, finished.output
    assert shared < 2 * ranks + 16, finished.output


def test_a_rank_that_passes_flags_on_is_lost(tmp_path: Path) -> None:
    finished = run(tmp_path, 20, tree=True)
    assert finished.output.count("heard") == 19, finished.output
