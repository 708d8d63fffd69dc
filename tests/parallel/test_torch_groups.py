"""`group=` for torch: the ranks of a group train as one process with their batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dl_comm
import dl_comm.torch as cdl


@pytest.fixture
def group(rank: int) -> Iterator[dl_comm.Group]:
    """The ranks 0 and 2, and rank 1: their sizes differ."""
    made = dl_comm.split(rank % 2)
    assert made is not None
    yield made
    made.free()


def model_from(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))


def batch(members: tuple[int, ...], step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The joined batches of some ranks, of four samples each."""
    parts = []
    for member in members:
        generator = torch.Generator().manual_seed(100 * step + member)
        parts.append(torch.randn(4, 5, generator=generator))
    joined = torch.cat(parts)
    return joined[:, :4], joined[:, 4:]


def test_groups_train_apart_as_one_process_with_the_joined_batch(rank: int, size: int, group: dl_comm.Group) -> None:
    model, alone = cdl.SyncBatchNorm.convert(model_from(rank), group), model_from(group.ranks[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = cdl.DistributedOptimizer(optimizer, group=group, named_parameters=model.named_parameters())
    expected = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step in range(3 + rank % 2):  # the groups make other numbers of steps
        for net, opt, members in ((model, optimizer, (rank,)), (alone, expected, group.ranks)):
            x, y = batch(members, step)
            opt.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            opt.step()
    assert optimizer.communication().total > 0 or group.size == 1
    for (name, mine), whole in zip(model.state_dict().items(), alone.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-5, atol=1e-6, msg=name)


def test_a_closure_gets_the_mean_of_the_group(rank: int, size: int, group: dl_comm.Group) -> None:
    parameter = nn.Parameter(torch.zeros(1))
    losses = []

    class Recording(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            losses.append(float(closure()))

    optimizer = cdl.DistributedOptimizer(Recording([parameter], lr=1.0), group=group)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (parameter + rank).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert losses == [sum(group.ranks) / group.size]


def test_parameters_state_and_checkpoints_of_a_group(
    rank: int, size: int, group: dl_comm.Group, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = model_from(rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 * (rank + 1))
    nn.functional.mse_loss(model(batch((rank,), 0)[0]), batch((rank,), 0)[1]).backward()
    optimizer.step()
    pairs = list(model.named_parameters())
    cdl.broadcast_parameters(pairs if rank % 2 else pairs[::-1], group.size - 1, group=group)
    cdl.broadcast_parameters(dict(model.named_buffers()), group.size - 1, group=group)
    last = group.ranks[-1]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*_gathered(group, model), strict=True))
    cdl.broadcast_optimizer_state(optimizer, group.size - 1, group=group)
    assert optimizer.param_groups[0]["lr"] == 0.01 * (last + 1)
    means = cdl.gradients([torch.full((2,), float(rank))], group=group)
    assert means[0].tolist() == [sum(group.ranks) / group.size] * 2
    assert cdl.average(rank, group=group) == sum(group.ranks) / group.size
    path = Path(dl_comm.broadcast_object(str(tmp_path_factory.mktemp("parts")), 0)) / f"part{rank % 2}.pt"
    cdl.save_checkpoint(path, group=group, owner=rank, model=model)
    assert cdl.load_checkpoint(path, group=group)["owner"] == group.ranks[0]


def _gathered(group: dl_comm.Group, model: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    of_last = group.broadcast_object([each.detach() for each in model.state_dict().values()], group.size - 1)
    return list(model.state_dict().values()), of_last


def test_the_state_of_an_optimizer_stays_in_its_group(rank: int, size: int, group: dl_comm.Group) -> None:
    parameter = nn.Parameter(torch.full((2,), float(rank)))
    optimizer = torch.optim.SGD([parameter], lr=0.5 + rank, momentum=0.9)
    optimizer = cdl.DistributedOptimizer(optimizer, group=group, broadcast=False)
    cdl.broadcast_optimizer_state(optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.5 + group.ranks[0]


def test_the_gradient_of_a_mean_over_a_group(rank: int, size: int, group: dl_comm.Group) -> None:
    x = torch.full((3,), float(rank), requires_grad=True)
    mean = cdl.gradients([x], group=group)[0]
    ((rank + 1) * mean).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [sum(member + 1 for member in group.ranks) / group.size] * 3


def test_optimizers_of_one_group_and_of_all_ranks(rank: int, size: int, group: dl_comm.Group) -> None:
    """Their calls do not meet, although only some ranks have made a second one."""
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    optimizers = [cdl.DistributedOptimizer(torch.optim.SGD([parameters[0]], lr=1.0), group=group)]
    if rank % 2 == 0:
        optimizers.append(cdl.DistributedOptimizer(torch.optim.SGD([parameters[1]], lr=1.0), group=group))
    optimizers.append(cdl.DistributedOptimizer(torch.optim.SGD([parameters[2]], lr=1.0)))
    for optimizer in optimizers:
        for parameter in optimizer.param_groups[0]["params"]:
            (parameter * (rank + 1)).sum().backward()
        optimizer.step()
    mean, mean_of_all = sum(member + 1 for member in group.ranks) / group.size, (size + 1) / 2
    assert parameters[0].tolist() == [-mean] * 2
    assert parameters[1].tolist() == [-mean if rank % 2 == 0 else 0.0] * 2
    torch.testing.assert_close(parameters[2].detach(), torch.full((2,), -mean_of_all))


def test_a_group_has_no_schedule(group: dl_comm.Group) -> None:
    for options in ({"team": 1}, {"nstep": 10}):
        with pytest.raises(dl_comm.ArgumentError, match="group"):
            cdl.DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), group=group, **options)
    with pytest.raises(dl_comm.ArgumentError, match="invalid group"):
        cdl.DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), group=0)  # type: ignore[arg-type]


def test_other_parameters_on_a_rank_of_the_group(rank: int, size: int) -> None:
    if size < 3:
        pytest.skip("needs two ranks in a group of two groups")
    made = dl_comm.split(rank // 2)
    assert made is not None
    with made:
        parameter = nn.Parameter(torch.zeros(2 + (rank == 1)))
        if made.size == 2:
            with pytest.raises(dl_comm.MismatchError):
                cdl.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), group=made)
        assert made.allreduce(1) == made.size
