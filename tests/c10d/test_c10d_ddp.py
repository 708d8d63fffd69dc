"""Stock DistributedDataParallel and ZeRO on 1, 2, 3 ranks: the same parameters as one process on the joined batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from c10d_helpers import not_gloo
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

STEPS, ROWS = 4, 6


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    """More than one bucket of a mebibyte, with the same weights on each rank."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 600), nn.Tanh(), nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 4)).to(dtype)


def batches(ranks: int, dtype: torch.dtype = torch.float32) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The joined batches of all ranks."""
    generator = torch.Generator().manual_seed(9)
    return [
        (
            torch.randn(ranks * ROWS, 8, generator=generator).to(dtype),
            torch.randn(ranks * ROWS, 4, generator=generator).to(dtype),
        )
        for _ in range(STEPS)
    ]


def train(model: nn.Module, optimizer: Any, data: list[tuple[torch.Tensor, torch.Tensor]], rows: slice) -> list[float]:
    """Trains on some rows of each batch; returns the losses."""
    losses = []
    for inputs, targets in data:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs[rows]), targets[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def reference(ranks: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model that one process trains on the joined batches."""
    model = network(dtype)
    train(model, sgd(model), batches(ranks, dtype), slice(None))
    return model


def near(model: nn.Module, other: nn.Module, tolerance: float = 1e-5) -> bool:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(mine, theirs, rtol=tolerance, atol=tolerance) for mine, theirs in pairs)


def agree(model: nn.Module) -> bool:
    """Whether all ranks have the same bits."""
    for tensor in (*model.parameters(), *model.buffers()):
        first = tensor.detach().clone()
        dist.broadcast(first, 0)
        if not torch.equal(first, tensor):
            return False
    return True


def mine(rank: int) -> slice:
    """The rows of this rank."""
    return slice(rank * ROWS, (rank + 1) * ROWS)


OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "static views": {"static_graph": True, "gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0.1, "gradient_as_bucket_view": True},
    "no buffers": {"broadcast_buffers": False},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_parameters_are_those_of_one_process(rank: int, size: int, options: str) -> None:
    torch.manual_seed(rank)
    model = DistributedDataParallel(network(), **OPTIONS[options])
    train(model, sgd(model), batches(size), mine(rank))
    assert agree(model)
    assert near(model.module, reference(size))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_types(rank: int, size: int, dtype: torch.dtype) -> None:
    model = DistributedDataParallel(network(dtype))
    train(model, sgd(model), batches(size, dtype), mine(rank))
    assert agree(model)
    assert near(model.module, reference(size, dtype), 1e-12 if dtype == torch.float64 else 0.1)


def test_weights_start_from_the_first_rank(rank: int, size: int) -> None:
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)))
    assert agree(model)


def test_buffers_are_broadcast(rank: int, size: int) -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)))
    train(model, sgd(model), batches(size), mine(rank))
    model(batches(size)[0][0][mine(rank)])
    with torch.no_grad():
        model.eval()
        model.train()
        model.module[1].num_batches_tracked += rank
        model(torch.zeros(2, 8))
    assert int(model.module[1].num_batches_tracked) == STEPS + 2


class Branches(nn.Module):
    """Uses another branch in each call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """Through one branch."""
        result: torch.Tensor = self.branches[index](x)
        return result


def test_unused_parameters(rank: int, size: int) -> None:
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    for step in range(4):
        model.zero_grad()
        model(torch.full((2, 4), rank + 1.0), (step + rank) % 2).sum().backward()
    for index, branch in enumerate(model.module.branches):
        users = [other for other in range(size) if (3 + other) % 2 == index]
        expected = sum(2.0 * (other + 1) for other in users) / size
        if users:
            assert torch.allclose(branch.weight.grad, torch.full((4, 4), expected)), index
        else:
            assert branch.weight.grad is None or not branch.weight.grad.any()


def test_accumulation_without_sync(rank: int, size: int) -> None:
    model, single = DistributedDataParallel(network()), network()
    data = batches(size)
    with model.no_sync():
        nn.functional.mse_loss(model(data[0][0][mine(rank)]), data[0][1][mine(rank)]).backward()
    nn.functional.mse_loss(model(data[1][0][mine(rank)]), data[1][1][mine(rank)]).backward()
    for inputs, targets in data[:2]:
        nn.functional.mse_loss(single(inputs), targets).backward()
    for found, expected in zip(model.parameters(), single.parameters(), strict=True):
        assert torch.allclose(found.grad, expected.grad, rtol=1e-4, atol=1e-6)


def test_join_with_uneven_inputs(rank: int, size: int) -> None:
    """Rank r has r + 1 batches; the others' gradients are divided by the number of all ranks."""
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        model.module.weight.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with model.join(divide_by_initial_world_size=True):
        for _ in range(rank + 1):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    expected = -sum((size - step) / size for step in range(size))
    assert torch.allclose(model.module.weight, torch.full((1, 2), expected))


HOOKS: dict[str, tuple[Any, float]] = {
    "allreduce": (default_hooks.allreduce_hook, 1e-5),
    "fp16": (default_hooks.fp16_compress_hook, 1e-2),
    "bf16": (default_hooks.bf16_compress_hook, 5e-2),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks(rank: int, size: int, name: str) -> None:
    hook, tolerance = HOOKS[name]
    model = DistributedDataParallel(network(), bucket_cap_mb=0.5)
    model.register_comm_hook(None, hook)
    train(model, sgd(model), batches(size), mine(rank))
    assert agree(model)
    assert near(model.module, reference(size), tolerance)


@not_gloo("deadlocks, because callbacks wait on its two threads")
@pytest.mark.timeout(60)
def test_power_sgd_in_several_buckets(rank: int, size: int) -> None:
    """Callbacks of futures start calls and wait for them, for several buckets at once."""
    model = DistributedDataParallel(network(), bucket_cap_mb=0.5)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = train(model, optimizer, batches(size)[:1] * 12, mine(rank))
    assert agree(model)
    assert losses[-1] < losses[0]


def test_sparse_gradients(rank: int, size: int) -> None:
    torch.manual_seed(2)
    model = DistributedDataParallel(nn.EmbeddingBag(10, 3, sparse=True))
    model(torch.tensor([[rank, 9]])).sum().backward()
    found = model.module.weight.grad.to_dense()
    expected = torch.zeros(10, 3)
    for other in range(size):
        expected[other] += 0.5 / size
        expected[9] += 0.5 / size
    assert torch.allclose(found, expected)


def test_two_models_in_two_groups(rank: int, size: int) -> None:
    groups = [dist.new_group(), dist.new_group()]
    models = [DistributedDataParallel(network(), process_group=group) for group in groups]
    data = batches(size)
    for inputs, targets in data[:2]:
        sum(nn.functional.mse_loss(model(inputs[mine(rank)]), targets[mine(rank)]) for model in models).backward()
    first, second = (list(model.parameters()) for model in models)
    assert all(torch.equal(one.grad, two.grad) for one, two in zip(first, second, strict=True))


@pytest.mark.parametrize("views", [False, True])
def test_zero_redundancy_optimizer(rank: int, size: int, views: bool) -> None:
    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, parameters_as_bucket_view=views, lr=0.1, momentum=0.9
    )
    train(model, optimizer, batches(size), mine(rank))
    assert agree(model)
    assert near(model.module, reference(size))
    optimizer.consolidate_state_dict(0)
    assert rank != 0 or optimizer.state_dict()["state"]


def test_zero_redundancy_optimizer_joins(rank: int, size: int) -> None:
    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with Join([model, optimizer]):
        train(model, optimizer, batches(size)[: rank + 1], mine(rank))
    assert agree(model)
