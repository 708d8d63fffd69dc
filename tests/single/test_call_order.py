"""Started calls on the same memory, on two "hosts" of one rank each: there a long call has two threads."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from launch import launch

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare to name hosts"
)

ON_HOSTS = ["unshare", "--uts", "bash", "-c", 'hostname host$PMI_RANK && exec "$@"', "on a host"]

NUMPY = """
import numpy as np, dl_comm
dl_comm.init()
size = dl_comm.get_nranks()
for step in range(20):
    x = np.ones(1 << 21, np.float32)
    # The last chunk ends last, the one in the middle in between.
    part = x[-8:] if step % 2 else x[len(x) // 2 + 200_000 :][:8]
    first = dl_comm.allreduce(x, out=x, async_op=True, name="long")
    if step % 4 < 2:
        dl_comm.allreduce(part, out=part, async_op=True, name="short").wait()
    else:
        dl_comm.allreduce(part, out=part, name="short")
    first.wait()
    assert set(part) == {size**2}, (step, part)
    assert x[0] == size
dl_comm.finalize()
print("in order", flush=True)
"""

TORCH = """
import os, torch, torch.distributed as dist, dl_comm.torch
dist.init_process_group("dl_comm")
size = dist.get_world_size()
for step in range(20):
    x = torch.ones(1 << 21)
    works = [dist.all_reduce(x, async_op=True), dist.all_reduce(x[-8:], async_op=step % 2 == 0)]
    [work.wait() for work in works if work is not None]
    assert set(x[-8:].tolist()) == {size**2}, (step, x[-8:])
dist.destroy_process_group()
print("in order", flush=True)
"""


@pytest.mark.parametrize("program", ["numpy", pytest.param("torch", marks=pytest.mark.heavy)])
def test_calls_on_the_same_memory_take_effect_in_their_order(program: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(NUMPY if program == "numpy" else TORCH)
    finished = launch(2, [*ON_HOSTS, sys.executable, str(script)], 120)
    assert finished.returncode == 0, finished.output
    assert finished.output.count("in order") == 2, finished.output
