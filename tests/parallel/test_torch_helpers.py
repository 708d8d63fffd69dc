"""What only torch has in the helpers: schedules of its optimizers, checkpoints, metrics that require gradients."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import dl_comm as mc  # noqa: E402
import dl_comm.torch as cdl  # noqa: E402
from dl_comm import training  # noqa: E402


def made(seed: int, lr: float = 0.1) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    return model, cdl.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=lr))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.rand(8, 4)).pow(2).mean().backward()
    optimizer.step()


def test_the_optimizer_follows_the_schedule(size: int) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.05}]
    optimizer = cdl.DistributedOptimizer(torch.optim.SGD(groups, lr=0.5))
    schedule = training.WarmUp(3, training.Cosine(training.scaled_lr(0.2), 10))
    scheduler = cdl.lr_scheduler(optimizer, schedule)
    for step in range(12):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(schedule(step), abs=1e-12)
        assert optimizer.param_groups[1]["lr"] == pytest.approx(schedule(step) / 10, abs=1e-12)
        if step == 5:
            state = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        sum(parameter.sum() for parameter in parameters).backward()
        optimizer.step()
        scheduler.step()
    # goes on where it was
    optimizer.load_state_dict(state["optimizer"])
    again = cdl.lr_scheduler(optimizer, schedule, last_epoch=5)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(schedule(6))
    again.load_state_dict(state["scheduler"])
    again.step()
    assert optimizer.param_groups[1]["lr"] == pytest.approx(schedule(6) / 10)


@pytest.mark.parametrize("length", [0, 1, 7, 12])
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_sampler_takes_what_that_of_torch_takes(length: int, drop_last: bool, rank: int, size: int) -> None:
    """Without a shuffle; but torch refuses to pad nothing, and to drop all."""
    if length < size and (drop_last or length == 0):
        assert list(cdl.DistributedSampler(length, drop_last=drop_last)) == []
        return
    data = torch.utils.data.TensorDataset(torch.arange(length))
    theirs = torch.utils.data.DistributedSampler(data, size, rank, shuffle=False, drop_last=drop_last)
    ours = cdl.DistributedSampler(data, shuffle=False, drop_last=drop_last)
    assert (list(ours), len(ours)) == (list(theirs), len(theirs))
    assert (ours.rank, ours.num_replicas, ours.drop_last) == (theirs.rank, theirs.num_replicas, theirs.drop_last)


def test_a_data_loader_with_workers_takes_the_sampler(rank: int, size: int) -> None:
    sampler = cdl.DistributedSampler(list(range(10)), seed=3, even=False)
    loader = torch.utils.data.DataLoader(list(range(10)), batch_size=2, sampler=sampler, num_workers=1)
    seen = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert len(loader) == -(-len(sampler) // 2)
        mine = torch.cat(list(loader))
        assert mine.tolist() == list(sampler)
        seen.append(cdl.all_gather(mine, ragged=True).tolist())
        assert sorted(seen[-1]) == list(range(10))
    assert seen[0] != seen[1]


def test_a_rate_of_zero_has_no_ratio() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.0)
    with pytest.raises(mc.ArgumentError, match="a positive one"):
        cdl.lr_scheduler(optimizer, training.Constant(0.1))


def test_a_checkpoint_is_written_once_and_read_by_all(tmp_path: Path, rank: int, size: int) -> None:
    path = Path(cdl.broadcast_object(str(tmp_path))) / "model.pt"
    model, optimizer = made(rank)
    train(model, optimizer)
    cdl.broadcast_parameters(model)  # BatchNorm's statistics too
    cdl.save_checkpoint(path, model=model, optimizer=optimizer, step=7)
    assert os.listdir(path.parent) == ["model.pt"]

    other, other_optimizer = made(100 + rank, lr=0.7)
    # only rank 0 needs to see the file
    loaded = cdl.load_checkpoint(path if rank == 0 else "elsewhere")
    other.load_state_dict(loaded["model"])
    other_optimizer.load_state_dict(loaded["optimizer"])
    assert loaded["step"] == 7
    assert other_optimizer.param_groups[0]["lr"] == 0.1
    for mine, expected in zip(other.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(mine, expected)
    train(other, other_optimizer)
    assert mc.check_buffers_match(list(other.parameters()), 1) == 0


def test_a_checkpoint_that_fails_on_rank_0(tmp_path: Path, rank: int) -> None:
    folder = Path(cdl.broadcast_object(str(tmp_path)))
    with pytest.raises(RuntimeError if rank == 0 else mc.CommError, match="gone"):
        cdl.save_checkpoint(folder / "gone" / "model.pt", step=1)
    with pytest.raises(FileNotFoundError if rank == 0 else mc.CommError, match="none.pt"):
        cdl.load_checkpoint(folder / "none.pt")
    cdl.save_checkpoint(folder / "model.pt", step=1)
    assert cdl.load_checkpoint(folder / "model.pt") == {"step": 1}


def test_a_metric_that_requires_a_gradient(rank: int, size: int) -> None:
    loss = torch.tensor(float(rank), requires_grad=True)
    assert mc.average_metrics({"loss": loss}) == {"loss": (size - 1) / 2}


def test_replicas_of_a_model_and_its_optimizer(rank: int, size: int) -> None:
    model, optimizer = made(rank)  # the optimizer makes the parameters equal
    train(model, optimizer)
    cdl.broadcast_parameters(model.named_buffers())
    mc.check_replicas(model, optimizer)
    with torch.no_grad():
        model[2].bias[0] += rank
        optimizer.state[model[0].weight]["exp_avg"][0, 0] += rank
    if size == 1:
        mc.check_replicas(model, optimizer)
        return
    others = ", ".join(map(str, range(1, size)))
    with pytest.raises(mc.MismatchError) as caught:
        mc.check_replicas(model, optimizer)
    assert f"Sequential['2.bias'] float32[1] of rank(s) {others}" in str(caught.value)
    assert f"['state'][0]['exp_avg'] float32[3, 4] of rank(s) {others}" in str(caught.value)
    assert str(caught.value).startswith("2 of ")


def test_training_goes_on_in_the_middle_of_an_epoch(size: int, tmp_path: Path) -> None:
    """The parameters end with the same bits as without a break, with the same samples and dropout."""
    x = torch.linspace(-1, 1, 8 * size)[:, None]
    data = torch.utils.data.TensorDataset(x, 3 * x)

    def start() -> tuple[torch.nn.Module, torch.optim.Optimizer, training.DistributedSampler]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        optimizer = cdl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
        training.seed_rank(1)
        return model, optimizer, cdl.DistributedSampler(data, seed=4)

    def run(
        model: torch.nn.Module, optimizer: torch.optim.Optimizer, sampler: training.DistributedSampler, steps: int
    ) -> list[list[float]]:
        """The samples of each step."""
        seen: list[list[float]] = []
        # A loader draws a number in each epoch: from its own generator, not from that of dropout.
        loader = torch.utils.data.DataLoader(data, 2, sampler=sampler, generator=torch.Generator())
        for epoch in range(sampler.epoch, 3):
            sampler.set_epoch(epoch)
            for inputs, targets in loader:
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
                sampler.advance(len(inputs))
                seen.append(inputs.flatten().tolist())
                if len(seen) == steps:
                    return seen
        return seen

    model, optimizer, sampler = start()
    whole = run(model, optimizer, sampler, 99)
    assert len(whole) == 3 * 4
    wanted = [each.detach().clone() for each in model.parameters()]
    assert all(each.isfinite().all() for each in wanted)
    del optimizer

    model, optimizer, sampler = start()
    seen = run(model, optimizer, sampler, 6)
    assert sampler.state_dict() == {"epoch": 1, "taken": 4 * size, "length": 8 * size, "seed": 4}
    path = mc.broadcast_object(str(tmp_path / "model.pt"))
    parts = {"model": model, "optimizer": optimizer, "sampler": sampler}
    cdl.save_checkpoint(path, random=mc.random_states(), **parts)
    del optimizer, parts

    model, optimizer, sampler = start()
    state = cdl.load_checkpoint(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    sampler.load_state_dict(state["sampler"])
    mc.set_random_states(state["random"])
    assert len(sampler) == 4
    assert seen + run(model, optimizer, sampler, 99) == whole
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), wanted, strict=True))
    mc.check_replicas(model, optimizer)
