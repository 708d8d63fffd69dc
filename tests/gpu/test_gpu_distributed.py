"""torch.distributed with the backend dl_comm on GPU tensors: ``tests/ranks.py N SECONDS python -m pytest FILE``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import dl_comm.torch  # noqa: F401 (registers the backend)
from job import KIND
from values import FLOATS, late, small

STEPS, ROWS = 4, 6
RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
TYPES = [*FLOATS, torch.uint8, torch.int16, torch.int64, torch.complex64, torch.bool]


@pytest.fixture(scope="session", autouse=True)
def device() -> Iterator[torch.device]:
    """The device of this rank; makes the process group."""
    found = torch.device("cpu")
    if KIND == "cuda":
        found = torch.device("cuda", RANK % torch.cuda.device_count())
        torch.cuda.set_device(found)
    dist.init_process_group("dl_comm", timeout=timedelta(seconds=60))
    yield found
    dist.barrier()
    dist.destroy_process_group()


def empty(count: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """A tensor for each rank."""
    return [torch.zeros(count, dtype=dtype, device=device) for _ in range(SIZE)]


def all_reduce(mine: torch.Tensor, op: dist.ReduceOp) -> list[torch.Tensor]:
    dist.all_reduce(mine, op)
    return [mine]


def reduce(mine: torch.Tensor, op: dist.ReduceOp) -> list[torch.Tensor]:
    dist.reduce(mine, SIZE - 1, op)
    return [mine] if RANK == SIZE - 1 else []


def reduce_scatter(mine: torch.Tensor, op: dist.ReduceOp) -> list[torch.Tensor]:
    found = torch.zeros_like(mine)
    dist.reduce_scatter_tensor(found, mine.repeat(SIZE), op)
    return [found]


def all_gather(mine: torch.Tensor) -> list[torch.Tensor]:
    found = empty(mine.numel(), mine.dtype, mine.device)
    dist.all_gather(found, mine)
    return found


def all_to_all(mine: torch.Tensor) -> list[torch.Tensor]:
    found = torch.zeros_like(mine.repeat(SIZE))
    dist.all_to_all_single(found, mine.repeat(SIZE))
    return [found]


def broadcast(mine: torch.Tensor) -> list[torch.Tensor]:
    dist.broadcast(mine, SIZE - 1)
    return [mine]


def gather(mine: torch.Tensor) -> list[torch.Tensor]:
    found = empty(mine.numel(), mine.dtype, mine.device) if RANK == 0 else None
    dist.gather(mine, found, 0)
    return found or []


def scatter(mine: torch.Tensor) -> list[torch.Tensor]:
    found = torch.zeros_like(mine)
    dist.scatter(found, [mine.roll(other) for other in range(SIZE)] if RANK == 0 else None, 0)
    return [found]


def exchange(mine: torch.Tensor) -> list[torch.Tensor]:
    found = torch.zeros_like(mine)
    work = dist.isend(mine, (RANK + 1) % SIZE) if SIZE > 1 else None
    if work is None:
        return [mine]
    dist.recv(found, (RANK - 1) % SIZE)
    work.wait()
    return [found]


REDUCTIONS = [all_reduce, reduce, reduce_scatter]
MOVES = [all_gather, all_to_all, broadcast, gather, scatter, exchange]


def compare(call: Callable[[torch.Tensor], list[torch.Tensor]], mine: torch.Tensor, device: torch.device) -> None:
    """Makes a call with a tensor in host memory and on the device."""
    expected, found = call(mine.clone()), call(late(mine, device))
    for one, other in zip(found, expected, strict=True):
        assert one.device == device
        tolerance = 2 * torch.finfo(one.dtype).eps if one.is_floating_point() else 0
        torch.testing.assert_close(one.cpu(), other, rtol=tolerance, atol=0)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("call", REDUCTIONS, ids=lambda call: call.__name__)
def test_reductions(call: Callable[..., list[torch.Tensor]], dtype: torch.dtype, device: torch.device) -> None:
    operators = [dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT]
    if dtype == torch.bool:
        operators = [dist.ReduceOp.BAND, dist.ReduceOp.BOR]
    elif dtype.is_complex:
        operators = operators[:2]
    for op in operators:
        for count in (1, 777, 100_001):
            compare(lambda mine, op=op: call(mine, op), small(RANK, count, dtype), device)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("call", MOVES, ids=lambda call: call.__name__)
def test_moves(call: Callable[..., list[torch.Tensor]], dtype: torch.dtype, device: torch.device) -> None:
    for count in (1, 777, 100_001):
        compare(call, small(RANK, count, dtype), device)


def test_handles(device: torch.device) -> None:
    """The stream that waits for a handle sees the result; the host need not wait."""
    tensors = [late(small(RANK + step, 10_000, torch.float32), device) for step in range(8)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for step, (tensor, work) in enumerate(zip(tensors, works, strict=True)):
        work.wait()
        expected = sum(small(rank + step, 10_000, torch.float32) for rank in range(SIZE))
        assert torch.equal(tensor.cpu(), expected)


def network(device: torch.device) -> nn.Module:
    """Several buckets, with the same weights on each rank."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 600), nn.Tanh(), nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 4)).to(device)


def train(model: nn.Module, rows: slice, device: torch.device) -> None:
    """Trains on these rows of the joined batches."""
    generator = torch.Generator().manual_seed(9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        inputs = torch.randn(SIZE * ROWS, 8, generator=generator).to(device)
        optimizer.zero_grad()
        model(inputs[rows]).square().mean().backward()
        optimizer.step()


def near(model: nn.Module, device: torch.device) -> bool:
    """Whether the parameters are those of one process on the joined batches."""
    single = network(device)
    train(single, slice(None), device)
    for found, expected in zip(model.parameters(), single.parameters(), strict=True):
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        if not torch.allclose(whole, expected, rtol=1e-4, atol=1e-5):
            return False
    return True


@pytest.mark.parametrize("views", [False, True])
def test_data_parallel_training(views: bool, device: torch.device) -> None:
    model = DistributedDataParallel(network(device), bucket_cap_mb=0.5, gradient_as_bucket_view=views)
    train(model, slice(RANK * ROWS, (RANK + 1) * ROWS), device)
    assert near(model.module, device)


def test_fully_sharded_training(device: torch.device) -> None:
    mesh, model = init_device_mesh(device.type, (SIZE,)), network(device)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    train(fully_shard(model, mesh=mesh), slice(RANK * ROWS, (RANK + 1) * ROWS), device)
    assert near(model, device)
