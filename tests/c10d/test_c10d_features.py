"""What docs/torch.md says that works over the backend: the same training over it and over gloo, in one job."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

PAGE = Path(__file__).resolve().parents[2] / "docs/torch.md"
STEPS, ROWS = 5, 4
Group = dist.ProcessGroup


def network() -> nn.Module:
    """The same weights on each rank."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))


def batches(steps: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Those of this rank."""
    generator = torch.Generator().manual_seed(9 + dist.get_rank())
    return [
        (torch.randn(ROWS, 8, generator=generator), torch.randn(ROWS, 4, generator=generator)) for _ in range(steps)
    ]


def train(model: nn.Module, optimizer: Any, data: list[tuple[torch.Tensor, torch.Tensor]] | None = None) -> None:
    for inputs, targets in batches() if data is None else data:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def ddp(group: Group, **options: Any) -> nn.Module:
    model = DistributedDataParallel(network(), process_group=group, **options)
    train(model, sgd(model))
    return model


def options(group: Group) -> nn.Module:
    """One model with static_graph, and one with a layer that is not used."""
    static = ddp(group, static_graph=True, gradient_as_bucket_view=True, bucket_cap_mb=1)
    both = nn.ModuleDict({"used": network(), "not": nn.Linear(3, 3)})
    both.forward = both["used"].forward  # type: ignore[method-assign]
    model = DistributedDataParallel(both, process_group=group, find_unused_parameters=True)
    train(model, sgd(model))
    return nn.ModuleList([static, model.module["used"]])


def accumulation(group: Group) -> nn.Module:
    model = DistributedDataParallel(network(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    (first, _), (second, _) = batches(2)
    with model.no_sync():
        model(first).square().mean().backward()
    model(second).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return model


def with_hook(hook: Any, state: Callable[[Group], Any] = lambda group: group) -> Callable[[Group], nn.Module]:
    def run(group: Group) -> nn.Module:
        model = DistributedDataParallel(network(), process_group=group)
        model.register_comm_hook(state(group), hook)
        train(model, sgd(model))
        return model

    return run


def power_sgd(group: Group) -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)


def zero(group: Group) -> nn.Module:
    model = DistributedDataParallel(network(), process_group=group)
    train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, process_group=group, lr=0.01))
    return model


def join(group: Group) -> nn.Module:
    """Rank r has r + 1 batches."""
    model = DistributedDataParallel(network(), process_group=group)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, process_group=group, lr=0.1)
    with Join([model, optimizer]):
        train(model, optimizer, batches(dist.get_rank() + 1))
    return model


def post_local_sgd(group: Group) -> nn.Module:
    """Two steps with all ranks, then each rank alone, with a mean of the parameters in every second step."""
    model = DistributedDataParallel(network(), process_group=group)
    alone = dist.new_subgroups(1, backend=dist.get_backend(group))[0]
    state = post_localSGD_hook.PostLocalSGDState(group, alone, start_localSGD_iter=2)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=2, process_group=group)
    train(model, PostLocalSGDOptimizer(optim=sgd(model), averager=averager))
    return model


def embedding() -> nn.Module:
    torch.manual_seed(4)
    return nn.EmbeddingBag(20, 3, sparse=True)


def sparse_adam(group: Group) -> nn.Module:
    model = DistributedDataParallel(embedding(), process_group=group)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.tensor([[dist.get_rank() + step, 9]])).square().sum().backward()
        optimizer.step()
    return model


def fsdp(group: Group) -> nn.Module:
    # A name of its own: for equal meshes torch remembers the group of the first one, which the test's end destroys.
    mesh, model = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(f"of_{group.group_name}",)), network()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    train(model, sgd(model))
    return model


ROWS_OF_THE_PAGE: dict[str, Callable[[Group], nn.Module]] = {
    "`DistributedDataParallel`": ddp,
    "`find_unused_parameters`, `static_graph`, `gradient_as_bucket_view`": options,
    "`no_sync`, `clip_grad_norm_`": accumulation,
    "`fully_shard` (FSDP2)": fsdp,
    "`ZeroRedundancyOptimizer`": zero,
    "`Join`": join,
    "`fp16_compress_hook`": with_hook(default_hooks.fp16_compress_hook),
    "`bf16_compress_hook`": with_hook(default_hooks.bf16_compress_hook),
    "`powerSGD_hook`": with_hook(powerSGD_hook.powerSGD_hook, power_sgd),
    "`fp16_compress_wrapper(powerSGD_hook)`": with_hook(
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook), power_sgd
    ),
    "`PostLocalSGDOptimizer`": post_local_sgd,
    "`SparseAdam`, `Embedding(sparse=True)`": sparse_adam,
}
TOLERANCES = {
    "`fp16_compress_hook`": 1e-3,
    "`bf16_compress_hook`": 1e-2,
    "`fp16_compress_wrapper(powerSGD_hook)`": 1e-2,
}
"""gloo adds these in their own type, and rounds each sum."""


def parameters(model: nn.Module) -> list[torch.Tensor]:
    return [each.full_tensor() if isinstance(each, DTensor) else each.detach() for each in model.parameters()]


@pytest.mark.parametrize("row", ROWS_OF_THE_PAGE)
def test_the_numbers_are_those_of_gloo(row: str) -> None:
    group, gloo = dist.new_group(), dist.new_group(backend="gloo")
    train_over = ROWS_OF_THE_PAGE[row]
    tolerance = TOLERANCES.get(row, 1e-6)
    found, expected = parameters(train_over(group)), parameters(train_over(gloo))
    before = parameters(embedding() if train_over is sparse_adam else network()) * (2 if train_over is options else 1)
    for mine, theirs, start in zip(found, expected, before, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
        assert not torch.allclose(theirs, start, rtol=1e-3, atol=1e-3)


def test_the_table_of_the_page_has_these_rows() -> None:
    section = PAGE.read_text().partition("\n### What works over it\n")[2].partition("\n## ")[0]
    table = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    assert table == list(ROWS_OF_THE_PAGE)
