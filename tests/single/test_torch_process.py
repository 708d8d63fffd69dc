"""PyTorch in processes of their own: scripts as people write them, and the ends of a process's life."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from imported import TORCH, python
from installed import needs
from launch import launch

needs("torch")
pytestmark = pytest.mark.xdist_group("torch")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "torch.md"


def run(folder: Path, ranks: int, script: str, *, new: bool = False, **env: str) -> str:
    """Run `script` on `ranks` ranks and return what it printed; fail when a rank failed.

    ``new``: in new interpreters, which import torch themselves.
    """
    path = folder / "script.py"
    path.write_text(script)
    command = [sys.executable] if new else python(*TORCH)
    result = launch(ranks, [*command, str(path)], timeout=120, env={"OMP_NUM_THREADS": "1", **env})
    assert result.returncode == 0, result.output
    return str(result.output)


@pytest.mark.heavy  # the gate runs README's
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_ddp_script_of_the_documentation(tmp_path: Path, ranks: int) -> None:
    scripts = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (script,) = (script for script in scripts if "init_process_group" in script)
    weights = re.findall(rf"rank \d of {ranks}: weights (\[\[.*?\]\])", run(tmp_path, ranks, script, new=True))
    assert len(weights) == ranks
    assert len(set(weights)) == 1


# The call sequence of scripts for the Cray plugin: import, get_rank, wrap. No init, no broadcast, no finalize.
PLUGIN_SCRIPT = """
import torch
import dl_comm.torch as cdl

rank = cdl.get_rank()
torch.manual_seed(rank)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = cdl.DistributedOptimizer(optimizer, 1, 2)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.rand(8, 4)).pow(2).mean().backward()
    optimizer.step()
import dl_comm
assert dl_comm.check_buffers_match([p.detach().numpy() for p in model.parameters()], 1) == 0
print(f"rank {rank} of {cdl.get_nranks()} done")
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_script_that_never_says_init(tmp_path: Path, ranks: int) -> None:
    output = run(tmp_path, ranks, PLUGIN_SCRIPT)
    for rank in range(ranks):
        assert f"rank {rank} of {ranks} done" in output


LIFE = """
import torch
import dl_comm
import dl_comm.torch as cdl
from dl_comm.torch import _ops

def refused(call):
    try:
        call()
    except dl_comm.StateError as error:
        print("refused:", error)
        return True
    return False

x = torch.ones(3)
assert refused(lambda: dl_comm.gradients([x], 0))
assert refused(lambda: dl_comm.broadcast([x], 0))
assert refused(lambda: _ops.average_in_place([x], 0, "early"))
dl_comm.init()
assert torch.equal(dl_comm.gradients([x], 0)[0], x)
assert torch.equal(dl_comm.broadcast([torch.nn.Parameter(x)], 0)[0], x)
dl_comm.finalize()
assert refused(lambda: dl_comm.gradients([x], 0))
dl_comm.finalize()
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_before_init_and_after_finalize(tmp_path: Path, ranks: int) -> None:
    run(tmp_path, ranks, LIFE)


UNFINISHED = """
import torch
import dl_comm.torch as cdl

model = torch.nn.Sequential(*(torch.nn.Linear(50, 50) for _ in range(20)))
optimizer = cdl.DistributedOptimizer(torch.optim.Adam(model.parameters()), bucket_mb=1e-6)
model(torch.rand(8, 50)).sum().backward()
print("leaving")
"""


def test_leaving_while_averages_are_under_way(tmp_path: Path) -> None:
    assert run(tmp_path, 2, UNFINISHED, new=True).count("leaving") == 2


WORKERS = """
import torch
import dl_comm
import dl_comm.torch as cdl
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        try:
            dl_comm.gradients([torch.ones(1)], 0)
        except dl_comm.StateError:
            return torch.full((4,), index / 32)
        raise AssertionError("a forked child got through")

dl_comm.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = cdl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(2):
    for batch in DataLoader(Numbers(), batch_size=8, num_workers=2, multiprocessing_context="fork"):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
print("trained")
"""


def test_data_loader_workers(tmp_path: Path) -> None:
    assert run(tmp_path, 2, WORKERS).count("trained") == 2


SCALED = """
import torch
import dl_comm.torch as cdl

torch.manual_seed(cdl.get_rank())
model = torch.nn.Linear(4, 2)
optimizer = cdl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(4):
    optimizer.zero_grad()
    loss = model(torch.rand(8, 4)).pow(2).mean()
    if step == 2 and cdl.get_rank() == 0:
        loss = loss * float("inf")  # one rank overflows: all skip the step
    scaler.scale(loss).backward()
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
import dl_comm
assert scaler.get_scale() == 512.0, scaler.get_scale()
assert dl_comm.check_buffers_match([p.detach().numpy() for p in model.parameters()], 1) == 0
assert all(p.isfinite().all() for p in model.parameters())
"""


def test_loss_scaling(tmp_path: Path) -> None:
    run(tmp_path, 2, SCALED)


ENDS = """
import sys
import torch
import dl_comm
import dl_comm.torch as cdl

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(6)))
optimizer = cdl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), gradient_as_bucket_view=VIEWS)
for step in range(30):  # through all trials of the size of buckets
    optimizer.zero_grad()
    model(torch.full((4, 300), cdl.get_rank() + 0.1 * step)).square().mean().backward()
    optimizer.step()
gradients = [parameter.grad for parameter in model.parameters()]
before = torch.cat([gradient.flatten() for gradient in gradients])
del optimizer
dl_comm.finalize()
assert torch.equal(torch.cat([gradient.flatten() for gradient in gradients]), before)
torch.optim.SGD(model.parameters(), lr=0.1).step()
total = sum(float(parameter.detach().double().sum()) for parameter in model.parameters())
print(f"sum {total.hex()}\\n", end="")  # in one piece, as both ranks write to one pipe
"""


def test_gradients_outlive_the_job(tmp_path: Path) -> None:
    """With the memory of the ranks, on a file system that is none of memory, and without: the same bits."""
    sums = []
    for views in (True, False):
        for folder in ("/dev/shm", str(tmp_path)):
            output = run(tmp_path, 2, ENDS.replace("VIEWS", str(views)), DL_COMM_SHM_DIR=folder)
            sums += re.findall(r"sum (\S+)", output)
    assert len(sums) == 8
    assert len(set(sums)) == 1


@pytest.mark.parametrize("given", ["0.5", "none"])
def test_the_size_of_buckets_from_the_environment(tmp_path: Path, given: str) -> None:
    script = """
import dl_comm, torch
import dl_comm.torch as cdl
try:
    cdl.DistributedOptimizer(torch.optim.SGD(torch.nn.Linear(2, 2).parameters()))
    print("made")
except dl_comm.ArgumentError as error:
    print("refused:", error)
"""
    output = run(tmp_path, 1, script, DL_COMM_BUCKET_MB=given)
    assert ("made" if given == "0.5" else "refused: invalid DL_COMM_BUCKET_MB: 'none'") in output


GRID = """
import torch, dl_comm, dl_comm.torch as cdl
from torch import nn

world = dl_comm.world()
grid = world.grid(data=2, model=2)

class Half(nn.Module):
    '''Half of the hidden units of Whole; the halves of a replica add their outputs.'''
    def __init__(self, whole, group):
        super().__init__()
        part = slice(3 * group.rank, 3 * group.rank + 3)
        self.into = nn.Parameter(whole[0].weight.detach()[part].clone())
        self.out = nn.Parameter(whole[2].weight.detach()[:, part].clone())
        self.group = group
    def forward(self, x):
        return cdl.allreduce(torch.tanh(x @ self.into.T) @ self.out.T, group=self.group)

torch.manual_seed(5)
whole = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 2, bias=False))
half = Half(whole, grid.model)
with torch.no_grad():
    half.into += grid.data.rank  # overwritten by the values of the first replica
optimizer = cdl.DistributedOptimizer(torch.optim.SGD(half.parameters(), lr=0.5, momentum=0.5), group=grid.data)
expected = torch.optim.SGD(whole.parameters(), lr=0.5, momentum=0.5)
for step in range(5):
    x, y = torch.randn(8, 4), torch.randn(8, 2)
    mine = slice(4 * grid.data.rank, 4 * grid.data.rank + 4)
    optimizer.zero_grad()
    # Backward adds the gradients of the losses of both halves, which are the same loss.
    (nn.functional.mse_loss(half(x[mine]), y[mine]) / grid.model.size).backward()
    optimizer.step()
    expected.zero_grad()
    nn.functional.mse_loss(whole(x), y).backward()
    expected.step()
part = slice(3 * grid.model.rank, 3 * grid.model.rank + 3)
torch.testing.assert_close(half.into, whole[0].weight[part], rtol=1e-4, atol=1e-6)
torch.testing.assert_close(half.out, whole[2].weight[:, part], rtol=1e-4, atol=1e-6)
assert world.all_gather_object(grid.coordinates) == [{"data": d, "model": m} for d in range(2) for m in range(2)]
print("fine", flush=True)
"""


def test_two_replicas_of_a_model_split_over_two_ranks(tmp_path: Path) -> None:
    assert run(tmp_path, 4, GRID).count("fine") == 4
