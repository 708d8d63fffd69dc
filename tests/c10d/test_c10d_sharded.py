"""FSDP2, HSDP, DTensor, tensor parallelism and pipelines of torch on 1, 2, 3 ranks, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from c10d_helpers import fewer_than, not_gloo
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

STEPS, ROWS = 3, 4


def network() -> nn.Sequential:
    """Odd sizes, so that shards are uneven; the same weights on each rank."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 37), nn.Tanh(), nn.Linear(37, 37), nn.Tanh(), nn.Linear(37, 4))


def batches(ranks: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(ranks * ROWS, 8, generator=generator) for _ in range(STEPS)]


def train(model: nn.Module, data: list[torch.Tensor], rows: slice, clip: float | None = None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for inputs in data:
        optimizer.zero_grad()
        model(inputs[rows]).float().square().mean().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def mine(rank: int) -> slice:
    return slice(rank * ROWS, (rank + 1) * ROWS)


def near(model: nn.Module, ranks: int, tolerance: float = 1e-5, clip: float | None = None) -> bool:
    """Whether the whole parameters are those of one process on the joined batches."""
    single = network()
    train(single, batches(ranks), slice(None), clip)
    for found, expected in zip(model.parameters(), single.parameters(), strict=True):
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        if not torch.allclose(whole.float(), expected, rtol=tolerance, atol=tolerance):
            return False
    return True


def sharded(mesh: Any, **options: Any) -> nn.Module:
    """A model with a group of parameters per layer."""
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)  # type: ignore[no-any-return]


@not_gloo("no AVG in reduce_scatter_tensor of this kind")
@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp(rank: int, size: int, reshard: bool) -> None:
    model = sharded(init_device_mesh("cpu", (size,)), reshard_after_forward=reshard)
    train(model, batches(size), mine(rank))
    assert near(model, size)


def test_fsdp_with_clipped_gradients(rank: int, size: int) -> None:
    model = sharded(init_device_mesh("cpu", (size,)))
    train(model, batches(size), mine(rank), clip=0.05)
    assert near(model, size, clip=0.05)


def test_fsdp_in_mixed_precision(rank: int, size: int) -> None:
    for reduced in (torch.bfloat16, torch.float32):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
        model = sharded(init_device_mesh("cpu", (size,)), mp_policy=policy)
        train(model, batches(size), mine(rank))
        assert near(model, size, 0.05)
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


@not_gloo("no PREMUL_SUM")
def test_fsdp_with_a_factor(rank: int, size: int) -> None:
    """The gradients are divided by twice the number of ranks, and the loss is doubled."""
    model = sharded(init_device_mesh("cpu", (size,)))
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(2.0 * size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for inputs in batches(size):
        optimizer.zero_grad()
        (2 * model(inputs[mine(rank)]).square().mean()).backward()
        optimizer.step()
    assert near(model, size)


def test_fsdp_accumulates(rank: int, size: int) -> None:
    model, single = sharded(init_device_mesh("cpu", (size,))), network()
    data = batches(size)
    model.set_requires_gradient_sync(False)
    model(data[0][mine(rank)]).square().mean().backward()
    model.set_requires_gradient_sync(True)
    model(data[1][mine(rank)]).square().mean().backward()
    for inputs in data[:2]:
        single(inputs).square().mean().backward()
    for found, expected in zip(model.parameters(), single.parameters(), strict=True):
        assert torch.allclose(found.grad.full_tensor(), expected.grad, rtol=1e-4, atol=1e-6)


@not_gloo("its process group allocates no memory")
def test_fsdp_allocates_from_the_group(rank: int, size: int) -> None:
    model = sharded(init_device_mesh("cpu", (size,)))
    if not hasattr(model, "set_allocate_memory_from_process_group_for_comm"):
        pytest.skip(f"torch {torch.__version__} lacks set_allocate_memory_from_process_group_for_comm")
    for module in model.modules():
        if hasattr(module, "set_allocate_memory_from_process_group_for_comm"):
            module.set_allocate_memory_from_process_group_for_comm(True)
    train(model, batches(size), mine(rank))
    assert near(model, size)


@pytest.mark.parametrize("replicas", [False, True])
def test_hsdp(rank: int, size: int, replicas: bool) -> None:
    """Groups of one rank in one of the two dimensions."""
    shape = (size, 1) if replicas else (1, size)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh)
    train(model, batches(size), mine(rank))
    assert near(model, size)


def test_distribute_and_redistribute(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,))
    for shape in ((6 * size, 3), (7, 5), (1, 2)):
        whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        for dimension in (0, 1):
            tensor = distribute_tensor(whole if rank == 0 else torch.zeros(shape), mesh, [Shard(dimension)])
            assert torch.equal(tensor.full_tensor(), whole), (shape, dimension)
            other = tensor.redistribute(mesh, [Shard(1 - dimension)])
            assert torch.equal(other.full_tensor(), whole), (shape, dimension)
            assert torch.equal(tensor.redistribute(mesh, [Replicate()]).to_local(), whole)
        copy = distribute_tensor(whole if rank == 0 else torch.zeros(shape), mesh, [Replicate()])
        assert torch.equal(copy.to_local(), whole)


def test_partial_tensors(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,))
    local = torch.arange(4.0 * size).reshape(2 * size, 2) + rank
    expected = size * torch.arange(4.0 * size).reshape(2 * size, 2) + size * (size - 1) / 2
    partial = DTensor.from_local(local, mesh, [Partial()])
    assert torch.equal(partial.redistribute(mesh, [Replicate()]).to_local(), expected)
    assert torch.equal(partial.redistribute(mesh, [Shard(0)]).to_local(), expected[2 * rank : 2 * rank + 2])
    highest = DTensor.from_local(local, mesh, [Partial("max")])
    assert torch.equal(highest.full_tensor(), torch.arange(4.0 * size).reshape(2 * size, 2) + size - 1)


def test_operations_on_shards(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(1)
    left, right = torch.randn(6 * size, 4), torch.randn(4, 5)
    product = distribute_tensor(left, mesh, [Shard(0)]) @ distribute_tensor(right, mesh, [Replicate()])
    assert torch.allclose(product.full_tensor(), left @ right, atol=1e-6)
    assert torch.allclose(product.sum().full_tensor(), (left @ right).sum(), rtol=1e-4)
    assert torch.allclose(product.mean().full_tensor(), (left @ right).mean(), rtol=1e-4, atol=1e-6)
    assert torch.allclose(product.max().full_tensor(), (left @ right).max())


def test_tensor_parallelism(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(4)
    single = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))
    model = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))
    model.load_state_dict(single.state_dict())
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    inputs = torch.randn(5, 6)
    found, expected = model(inputs), single(inputs)
    assert torch.allclose(found, expected, atol=1e-5)
    found.square().mean().backward()
    expected.square().mean().backward()
    for mine_, theirs in zip(model.parameters(), single.parameters(), strict=True):
        assert torch.allclose(mine_.grad.full_tensor(), theirs.grad, atol=1e-5)


@fewer_than(2)
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
def test_pipeline(rank: int, size: int, schedule: Any) -> None:
    torch.manual_seed(5)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(size)]
    whole = nn.Sequential(*layers)
    torch.manual_seed(5)
    own = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(size)][rank]
    stage = PipelineStage(own, rank, size, torch.device("cpu"))
    inputs, targets = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.zeros(8, 6)
    runner = schedule(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    for _ in range(3):
        own.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            runner.step(inputs)
        elif rank == size - 1:
            found = runner.step(target=targets, losses=losses)
            assert torch.allclose(found, whole(inputs), atol=1e-6)
        else:
            runner.step()
    nn.functional.mse_loss(whole(inputs), targets).backward()
    for mine_, theirs in zip(own.parameters(), layers[rank].parameters(), strict=True):
        assert torch.allclose(mine_.grad, theirs.grad, atol=1e-6)
