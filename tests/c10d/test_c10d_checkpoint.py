"""torch.distributed.checkpoint on 1, 2, 3 ranks: saving, loading, saving beside the training in the same group."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel


@pytest.fixture
def folder(rank: int) -> Iterator[Path]:
    """A folder for all ranks."""
    box: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(box, 0)
    yield Path(box[0])
    dist.barrier()
    if rank == 0:
        shutil.rmtree(box[0], ignore_errors=True)


def test_tensors_and_objects(rank: int, size: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(35.0).reshape(7, 5)
    saved = {"sharded": distribute_tensor(whole, mesh, [Shard(0)]), "plain": torch.full((3,), 4.0), "step": 12}
    dcp.save(saved, checkpoint_id=folder / "one")
    found = {"sharded": distribute_tensor(torch.zeros(7, 5), mesh, [Shard(1)]), "plain": torch.zeros(3), "step": 0}
    dcp.load(found, checkpoint_id=folder / "one")
    assert torch.equal(found["sharded"].full_tensor(), whole)
    assert found["plain"].tolist() == [4.0] * 3
    assert found["step"] == 12


def test_a_sharded_model_continues(rank: int, size: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (size,))

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = fully_shard(nn.Linear(9, 5), mesh=mesh)
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.full((2, 9), rank + 1.0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = made()
    step(model, optimizer)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "model")
    step(model, optimizer)
    again, other = made()
    weights, state = get_state_dict(again, other)
    loaded = {"model": weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id=folder / "model")
    set_state_dict(again, other, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    step(again, other)
    for found, expected in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(found.full_tensor(), expected.full_tensor())


def test_saving_beside_the_training(rank: int, size: int, folder: Path) -> None:
    """``async_save`` calls from a thread of its own, in the group in which DDP trains."""
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(50, 50))
    kept = {name: value.clone() for name, value in model.module.state_dict().items()}
    gloo = dist.new_group(backend="gloo") if dist.get_backend() == "gloo" else None
    pending = [
        dcp.async_save(
            {name: value.clone() for name, value in kept.items()} | {"number": i},
            checkpoint_id=folder / str(i),
            process_group=gloo,
        )
        for i in range(1)
    ]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(30):
        optimizer.zero_grad()
        model(torch.full((2, 50), rank + 1.0)).square().mean().backward()
        optimizer.step()
    for future in pending:
        future.result(timeout=60)
    found = {name: torch.zeros_like(value) for name, value in kept.items()} | {"number": -1}
    dcp.load(found, checkpoint_id=folder / "0")
    assert found["number"] == 0
    assert all(torch.equal(found[name], value) for name, value in kept.items())
    assert not torch.equal(model.module.weight, kept["weight"])


def test_a_damaged_checkpoint_is_an_error_on_all(rank: int, size: int, folder: Path) -> None:
    with pytest.raises(CheckpointException, match="(?i)metadata|exist"):
        dcp.load({"a": torch.zeros(1)}, checkpoint_id=folder / "none")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones.item() == size
