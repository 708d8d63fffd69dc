"""Functional collectives and torch.compile on 1, 2, 3 ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from c10d_helpers import not_gloo, torch_may_refuse
from torch import nn
from torch.nn.parallel import DistributedDataParallel

COMPILER = "aot_eager"


def everything(tensor: torch.Tensor, size: int) -> list[torch.Tensor]:
    """The functional collectives, one after the other."""
    group = dist.group.WORLD
    swapped = functional.all_to_all_single(tensor, None, None, group)
    return [
        functional.all_reduce(tensor, "sum", group),
        functional.all_reduce(tensor, "max", group) * 2,
        functional.all_gather_tensor(tensor, 0, group),
        functional.reduce_scatter_tensor(tensor, "sum", 0, group),
        functional.broadcast(tensor, 0, group),
        swapped,
        *functional.all_reduce_coalesced([tensor, tensor + 1], "sum", group),
        *functional.all_gather_into_tensor_coalesced([tensor, tensor + 1], group),
        *functional.reduce_scatter_tensor_coalesced([tensor, tensor + 1], "sum", [0, 0], group),
    ]


def expected(rank: int, size: int) -> list[torch.Tensor]:
    """What ``everything`` gives."""
    parts = [torch.full((size, 2), other + 1.0) for other in range(size)]
    total, whole = torch.full((size, 2), size * (size + 1) / 2), torch.cat(parts)
    return [
        total,
        2 * parts[-1],
        whole,
        total[:1],
        parts[0],
        torch.arange(1.0, size + 1).repeat(2, 1).t(),
        total,
        total + size,
        whole,
        whole + 1,
        total[:1],
        total[:1] + size,
    ]


@pytest.mark.parametrize("compiled", [False, True])
def test_functional_collectives(rank: int, size: int, compiled: bool) -> None:
    torch._dynamo.reset()
    call: Callable[..., Any] = torch.compile(everything, backend=COMPILER, fullgraph=True) if compiled else everything
    for _ in range(2):
        found = call(torch.full((size, 2), rank + 1.0), size)
        for index, (mine, right) in enumerate(zip(found, expected(rank, size), strict=True)):
            assert torch.equal(mine, right), index


@pytest.mark.parametrize("compiled", [False, True])
def test_functional_gather_of_columns(rank: int, size: int, compiled: bool) -> None:
    torch._dynamo.reset()

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        return functional.all_gather_tensor(tensor, 1, dist.group.WORLD) * 2

    call: Callable[..., Any] = torch.compile(gather, backend=COMPILER, fullgraph=True) if compiled else gather
    with torch_may_refuse("_maybe_view_chunk_cat", "all_gather_tensor of columns in torch.compile"):
        found = call(torch.full((size, 2), rank + 1.0))
    assert torch.equal(found, torch.cat([torch.full((size, 2), 2 * other + 2.0) for other in range(size)], 1))


def test_split_sizes(rank: int, size: int) -> None:
    """Also blocks without rows."""
    sends = [(rank + other) % 3 for other in range(size)]
    sent = torch.cat([torch.full((rows, 2), 10.0 * rank + other) for other, rows in enumerate(sends)])
    found = functional.all_to_all_single(sent, sends, sends, dist.group.WORLD)
    right = torch.cat([torch.full((rows, 2), 10.0 * other + rank) for other, rows in enumerate(sends)])
    assert torch.equal(found + 0, right)


@pytest.mark.parametrize("name", ["all_gather", "all_reduce", "reduce_scatter", "all_to_all_single", "broadcast"])
def test_gradients_through_collectives(rank: int, size: int, name: str) -> None:
    x = torch.full((size, 2), rank + 1.0, requires_grad=True)
    if name == "all_gather":
        torch.stack(differentiable.all_gather(x)).sum().backward()
        right = float(size)
    elif name == "all_reduce":
        differentiable.all_reduce(x).sum().backward()
        right = float(size)
    elif name == "reduce_scatter":
        differentiable.reduce_scatter(torch.empty(2), [part.clone() for part in x]).sum().backward()
        right = 1.0
    elif name == "all_to_all_single":
        differentiable.all_to_all_single(torch.empty(size, 2), x).sum().backward()
        right = 1.0
    else:
        differentiable.broadcast(x, 0).sum().backward()
        right = float(size) if rank == 0 else 0.0
    assert x.grad.tolist() == [[right] * 2] * size


def test_inplace_collectives_in_a_graph(rank: int, size: int) -> None:
    torch._dynamo.reset()

    @torch.compile(backend=COMPILER, fullgraph=True)
    def step(x: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y)
        dist.all_gather_into_tensor(whole, y)
        return y + 1

    for _ in range(2):
        whole = torch.zeros(3 * size)
        found = step(torch.full((3,), rank + 1.0), whole)
        assert found.tolist() == [size * (size + 1) + 1.0] * 3
        assert whole.tolist() == [size * (size + 1.0)] * 3 * size


@pytest.mark.parametrize("optimizer", ["ddp_optimizer", "no_optimization"])
def test_ddp_in_a_graph(rank: int, size: int, optimizer: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.config.optimize_ddp = optimizer
    generator = torch.Generator().manual_seed(9)
    data = [torch.randn(size * 4, 8, generator=generator) for _ in range(4)]

    def network() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 4))

    def train(model: Any, plain: nn.Module, rows: slice) -> None:
        sgd = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
        for inputs in data:
            sgd.zero_grad()
            model(inputs[rows]).square().mean().backward()
            sgd.step()

    model, single = DistributedDataParallel(network(), bucket_cap_mb=1), network()
    train(torch.compile(model, backend=COMPILER), model, slice(4 * rank, 4 * rank + 4))
    train(single, single, slice(None))
    for found, right in zip(model.parameters(), single.parameters(), strict=True):
        assert torch.allclose(found, right, rtol=1e-5, atol=1e-6)


@pytest.mark.heavy
@not_gloo("its result is known")
def test_inductor(rank: int, size: int) -> None:
    """The compiler of C++, which moves waits behind computation."""
    torch._dynamo.reset()

    @torch.compile(fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        total = functional.all_reduce(x, "sum", dist.group.WORLD)
        other = (x * 3).sin()
        return total + other

    x = torch.full((1000,), rank + 1.0)
    assert torch.allclose(step(x), torch.full((1000,), size * (size + 1) / 2) + (x * 3).sin())
