"""Unchanged scripts: torchrun, without an import of ours, torch.multiprocessing.spawn."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from c10d_helpers import BACKEND, GLOO, not_gloo

from imported import TORCH, python
from launch import QUIET, run
from ranks import start

pytestmark = pytest.mark.timeout(200)
TORCH_VERSION = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LOAD = "" if GLOO else "import dl_comm.torch\n"

STOCK = f"""
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
torch.set_num_threads(1)
dist.init_process_group({BACKEND!r})
model = DistributedDataParallel(torch.nn.Linear(4, 2))
model(torch.full((2, 4), dist.get_rank() + 1.0)).sum().backward()
gradient = model.module.weight.grad
assert torch.allclose(gradient, torch.full((2, 4), dist.get_world_size() + 1.0)), gradient
os.write(1, f"done on {{dist.get_rank()}} of {{dist.get_world_size()}} {{dist.get_backend()}}\\n".encode())
dist.destroy_process_group()
"""


def done(output: str, ranks: int = 2) -> bool:
    return all(f"done on {rank} of {ranks} {BACKEND}" in output for rank in range(ranks))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(STOCK)
    return path


def test_a_stock_script_under_torchrun(script: Path) -> None:
    finished = run([*TORCHRUN, str(script)], 120, {**QUIET, "OMP_NUM_THREADS": "1"})
    assert finished.returncode == 0, finished.output
    assert not finished.left, finished.left
    assert done(finished.output), finished.output


@pytest.mark.heavy
def test_a_stock_script_with_plain_processes(script: Path) -> None:
    for ranks in (1, 3):
        finished = start(ranks, [sys.executable, str(script)], 120)
        assert finished.returncode == 0, finished.output
        assert not finished.left, finished.left
        assert done(finished.output, ranks), finished.output


@pytest.mark.heavy
@not_gloo("hangs: it reads the addresses of the group before")
def test_again_under_torchrun(tmp_path: Path) -> None:
    """The agent's store keeps the keys of the groups before."""
    path = tmp_path / "script.py"
    lines = STOCK.splitlines()
    first = lines.index("torch.set_num_threads(1)") + 1
    path.write_text("\n".join([*lines[:first], "for _ in range(5):", *(f"    {line}" for line in lines[first:])]))
    finished = run([*TORCHRUN, str(path)], 120, {**QUIET, "OMP_NUM_THREADS": "1"})
    assert finished.returncode == 0, finished.output
    assert finished.output.count("done on 0 of 2") == 5, finished.output


@pytest.mark.heavy
@not_gloo("its groups do not outlive ranks")
def test_torchrun_starts_failed_ranks_again(tmp_path: Path) -> None:
    """The second rank fails at first; the other one must not hang, and both meet no traces of the first attempt."""
    path = tmp_path / "script.py"
    lines = STOCK.splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("model("))
    fail = "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and dist.get_rank() == 1: os._exit(5)"
    path.write_text("\n".join([*lines[:at], fail, *lines[at:]]))
    finished = run([*TORCHRUN, "--max-restarts", "2", str(path)], 150, {**QUIET, "OMP_NUM_THREADS": "1"})
    assert finished.returncode == 0, finished.output
    assert done(finished.output), finished.output


SPAWN = f"""
import os, torch, torch.distributed as dist, torch.multiprocessing as mp

def work(rank, size, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group({BACKEND!r}, rank=rank, world_size=size)
    ones = torch.ones(1000)
    dist.all_reduce(ones)
    assert (ones == size).all()
    os.write(1, f"done on {{rank}} of {{size}} {{dist.get_backend()}}\\n".encode())
    dist.destroy_process_group()

if __name__ == "__main__":
    import sys
    sys.path.insert(0, {str(Path(__file__).parents[1])!r})
    from ranks import free_port
    {LOAD.strip()}
    both = [mp.spawn(work, (2, free_port()), 2, join=False) for _ in range(int(sys.argv[1]))]
    for context in both:
        while not context.join():
            pass
    mp.spawn(work, (2, free_port()), 2)
"""


@pytest.mark.heavy
@pytest.mark.parametrize("together", [1, 2])
def test_jobs_of_spawn(tmp_path: Path, together: int) -> None:
    """One job after another, and two at the same time."""
    path = tmp_path / "script.py"
    path.write_text(SPAWN)
    finished = run([sys.executable, str(path), str(together)], 150, {**QUIET, "OMP_NUM_THREADS": "1"})
    assert finished.returncode == 0, finished.output
    assert not finished.left, finished.left
    assert finished.output.count("done on 1 of 2") == together + 1, finished.output


MONITORED = f"""
import os, time, torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group({BACKEND!r})
group = dist.new_group()
done = os.path.join(os.path.dirname(os.path.abspath(__file__)), "done")
if dist.get_rank() == 0:
    try:
        group.monitored_barrier(timedelta(0))
    except RuntimeError as error:
        os.write(1, f"raised {{error}}\\n".encode())
    open(done, "w").close()
while not os.path.exists(done):
    time.sleep(0.01)
"""


@pytest.mark.skipif(not GLOO and TORCH_VERSION < (2, 14), reason="older versions have it for gloo only")
def test_a_monitored_barrier_without_time_does_not_wait(tmp_path: Path) -> None:
    """The other rank comes only when it has ended."""
    path = tmp_path / "script.py"
    path.write_text(MONITORED)
    finished = start(2, [*python(*TORCH), str(path)], 60)
    assert finished.returncode == 0, finished.output
    assert "raised " in finished.output, finished.output
