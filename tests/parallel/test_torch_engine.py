"""dl_comm.torch.Engine on 1, 2, 3 ranks: it ends where one process with the joined batches does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import dl_comm  # noqa: E402
import dl_comm.torch as cdl  # noqa: E402

Batch = tuple[torch.Tensor, torch.Tensor]
SAMPLES = 4  # of a rank's batch

MAKERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=3),
}


def layers(seed: int) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [nn.Linear(5, 6, dtype=torch.float64), nn.Tanh(), nn.Linear(6, 1, dtype=torch.float64)]


def joined_batches(ranks: int, count: int = 3) -> list[Batch]:
    """The joined batches of some ranks."""
    generator = torch.Generator().manual_seed(11)
    inputs = [torch.rand(SAMPLES * ranks, 5, generator=generator, dtype=torch.float64) for _ in range(count)]
    return [(x, x.sum(1, keepdim=True).sin()) for x in inputs]


def batches(rank: int, ranks: int, count: int = 3) -> list[Batch]:
    """Those of one rank."""
    own = slice(rank * SAMPLES, (rank + 1) * SAMPLES)
    return [(x[own], y[own]) for x, y in joined_batches(ranks, count)]


def train_alone(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: int, epochs: int) -> float:
    """Train in one process; return the mean loss of the last epoch."""
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        losses[-1] = float(loss.detach())
        return loss

    joined = joined_batches(ranks)
    for x, y in joined * epochs:  # noqa: B007 - the closure reads them
        losses.append(0.0)
        optimizer.step(closure)
    return sum(losses[-len(joined) :]) / len(joined)


def assert_close(model: nn.Module, expected: nn.Module) -> None:
    for (name, one), other in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        torch.testing.assert_close(one, other[1], msg=name)


@pytest.mark.parametrize("optimizer", MAKERS)
@pytest.mark.parametrize("kind", ["plain", "wrapped", "blocks"])
@pytest.mark.parametrize("prefetch", [True, False])
def test_training_is_that_of_one_process(rank: int, size: int, optimizer: str, kind: str, prefetch: bool) -> None:
    alone = nn.Sequential(*layers(0))
    expected = train_alone(alone, MAKERS[optimizer](alone.parameters()), size, 2)
    model: nn.Module = nn.Sequential(*layers(rank))
    if kind == "blocks":
        model = cdl.nn.BlockSequential(layers(rank), 2)
    given = MAKERS[optimizer](model.parameters())
    if kind == "wrapped":
        given = cdl.DistributedOptimizer(given)
    engine = cdl.Engine(model, nn.functional.mse_loss, given, prefetch=prefetch)
    assert engine.optimizer is given
    assert isinstance(given, cdl.AveragingOptimizer) == (kind != "blocks")
    state = engine.train(batches(rank, size), 2)
    assert_close(model, alone)
    assert state.average_loss == pytest.approx(expected)
    assert (state.epoch, state.step, state.samples, state.training) == (2, 6, 3 * SAMPLES, True)
    assert dl_comm.check_buffers_match([p.detach().numpy() for p in model.parameters()], 1) == 0


def test_hooks_are_called_in_order_and_see_the_state(rank: int, size: int) -> None:
    model = nn.Sequential(*layers(rank))
    seen: list[tuple[str, int, int]] = []
    gradients = []

    def hook(name: str) -> Any:
        def call(state: cdl.EngineState) -> None:
            seen.append((name, state.epoch, state.step))
            if name == "on_sample":
                state.sample = (state.sample[0].double(), state.sample[1])
            if name == "on_forward":
                assert state.output.shape == (SAMPLES, 1)
                assert state.loss.numel() == 1
            if name == "on_backward":
                gradients.append(next(state.model.parameters()).grad.clone())
            if name == "on_end_epoch" and state.epoch == 1:
                state.epochs = 2

        return call

    names = ["on_start", "on_start_epoch", "on_sample", "on_forward", "on_backward", "on_update", "on_end_epoch"]
    engine = cdl.Engine(
        model, nn.functional.mse_loss, MAKERS["SGD"](model.parameters()), {name: hook(name) for name in names}
    )
    engine.hooks["on_end"] = hook("on_end")
    engine.train([(x.float(), y) for x, y in batches(rank, size, 2)], 5)
    expected = [("on_start", 0, 0)]
    for epoch in range(2):
        expected.append(("on_start_epoch", epoch, 2 * epoch))
        for step in (2 * epoch, 2 * epoch + 1):
            expected += [(f"on_{each}", epoch, step) for each in ("sample", "forward", "backward", "update")]
        expected.append(("on_end_epoch", epoch, 2 * epoch + 2))
    assert seen == [*expected, ("on_end", 2, 4)]
    assert all(cdl.all_gather(each[None]).unique(dim=0).shape[0] == 1 for each in gradients)
    seen.clear()
    engine.test([(x.float(), y) for x, y in batches(rank, size, 1)])
    assert seen == [("on_start", 0, 0), ("on_sample", 0, 0), ("on_forward", 0, 0), ("on_end", 0, 1)]


def test_the_loss_of_a_test_is_that_of_all_samples(rank: int, size: int) -> None:
    model = nn.Sequential(*layers(0), nn.Dropout(0.5))
    model[2].eval()
    engine = cdl.Engine(model, nn.functional.mse_loss, MAKERS["SGD"](model.parameters()), broadcast=False)
    # Ranks have different numbers of batches, of different sizes; the last rank has none.
    x, y = joined_batches(1, 1)[0]
    own = [(x[:n], y[:n]) for n in range(1, size - rank)]
    if size == 1:
        own = [(x, y)]
    found = engine.test(iter(own)).average_loss
    everything = [(x[:n], y[:n]) for each in range(size) for n in range(1, size - each)] or own
    with torch.no_grad():
        model.eval()
        losses = [nn.functional.mse_loss(model(x), y, reduction="sum").item() for x, y in everything]
        model.train()
    assert found == pytest.approx(sum(losses) / sum(len(x) for x, _ in everything))
    model[2].eval()
    engine.test(own or [(x, y)])
    assert model.training
    assert not model[2].training
    with pytest.raises(dl_comm.ArgumentError, match="no rank has a batch"):
        engine.test([])


def test_the_next_batch_is_fetched_during_backward(rank: int, size: int) -> None:
    fetched, threads = [], set()
    release = threading.Event()

    def items() -> Iterator[Batch]:
        for i, batch in enumerate(batches(rank, size)):
            fetched.append(i)
            threads.add(threading.current_thread())
            if i:
                release.set()
            yield batch

    model = nn.Sequential(*layers(rank))
    # Backward of the first step ends only if the second batch is fetched meanwhile.
    next(model.parameters()).register_hook(lambda _: release.wait(60) and None)
    engine = cdl.Engine(model, nn.functional.mse_loss, MAKERS["SGD"](model.parameters()))
    engine.train(items(), 1)
    assert release.is_set()
    assert fetched == [0, 1, 2]
    assert len(threads) == 1
    assert not any(thread.is_alive() for thread in threads)


def test_a_data_loader_and_its_sampler(rank: int, size: int) -> None:
    data = TensorDataset(*joined_batches(size, 1)[0])
    epochs: list[int] = []

    class Sampler(cdl.DistributedSampler):
        def set_epoch(self, epoch: int) -> None:
            epochs.append(epoch)
            super().set_epoch(epoch)

    loader = DataLoader(data, batch_size=2, sampler=Sampler(data))
    model = nn.Sequential(*layers(rank))
    criterion = nn.MSELoss()
    state = cdl.Engine(model, criterion, MAKERS["Adam"](model.parameters())).train(loader, 3)
    assert epochs == [0, 1, 2]
    assert state.step == 3 * SAMPLES // 2
    assert state.samples == SAMPLES


def test_a_group(rank: int, size: int) -> None:
    group = dl_comm.split(rank % 2)
    assert group is not None
    with group:
        alone = nn.Sequential(*layers(group.ranks[0]))
        expected = train_alone(alone, MAKERS["SGD"](alone.parameters()), group.size, 1 + rank % 2)
        for wraps in (False, True):
            model = nn.Sequential(*layers(rank))
            optimizer = MAKERS["SGD"](model.parameters())
            if wraps:
                optimizer = cdl.DistributedOptimizer(optimizer, group=group)
            engine = cdl.Engine(model, nn.functional.mse_loss, optimizer, group=None if wraps else group)
            state = engine.train(batches(group.rank, group.size), 1 + rank % 2)
            assert_close(model, alone)
            assert state.average_loss == pytest.approx(expected)
            with dl_comm.Group([rank]) as other, pytest.raises(dl_comm.ArgumentError, match="group is"):
                cdl.Engine(model, nn.functional.mse_loss, optimizer, group=other)


def test_what_broadcast_and_average_leave(rank: int, size: int) -> None:
    model = nn.Sequential(*layers(rank))
    optimizer = MAKERS["SGD"](model.parameters())
    engine = cdl.Engine(model, nn.functional.mse_loss, optimizer, broadcast=False, average=False)
    alone = nn.Sequential(*layers(rank))
    # Ranks have different numbers of batches.
    state = engine.train(batches(0, 1, 1 + rank), 1)
    assert not isinstance(optimizer, cdl.AveragingOptimizer)
    expected = MAKERS["SGD"](alone.parameters())
    for x, y in joined_batches(1, 1 + rank):
        expected.zero_grad()
        nn.functional.mse_loss(alone(x), y).backward()
        expected.step()
    assert_close(model, alone)
    assert state.step == 1 + rank


def test_a_resumed_rank_gives_its_state_to_all(rank: int, size: int) -> None:
    model = nn.Sequential(*layers(rank), nn.BatchNorm1d(1, dtype=torch.float64))
    optimizer = MAKERS["SGD"](model.parameters())
    engine = cdl.Engine(model, nn.functional.mse_loss, optimizer)
    if rank == 0:
        with torch.no_grad():
            model[3].running_mean.fill_(7)
            model[0].bias.fill_(5)
            optimizer.param_groups[0]["lr"] = 0.5
    engine.train([], 0)
    assert float(model[3].running_mean) == 7
    assert model[0].bias.tolist() == [5] * 6
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_different_numbers_of_batches_are_refused(rank: int, size: int) -> None:
    model = nn.Sequential(*layers(rank))
    engine = cdl.Engine(model, nn.functional.mse_loss, MAKERS["SGD"](model.parameters()))
    with pytest.raises(dl_comm.ArgumentError, match="no rank has a batch in epoch 1"):
        engine.train(iter(batches(rank, size)), 2)
    if size > 1:
        with pytest.raises(dl_comm.ArgumentError, match=r"iterator: the ranks have \[1, 2.*DistributedSampler"):
            engine.train(batches(rank, size, 1 + rank), 1)
        with pytest.raises(dl_comm.MismatchError, match="average loss"):
            engine.train(iter(batches(rank, size, 1 + (rank > 0))), 1)
    assert cdl.allreduce(1) == size


def test_errors_name_the_argument(rank: int, size: int) -> None:
    model = nn.Sequential(*layers(0))
    loss, optimizer = nn.functional.mse_loss, MAKERS["SGD"](model.parameters())
    for error, text, arguments, options in (
        (dl_comm.DTypeError, "model is a function", (loss, loss, optimizer), {}),
        (dl_comm.DTypeError, "criterion is a str", (model, "mse", optimizer), {}),
        (dl_comm.DTypeError, "optimizer is a Sequential", (model, loss, model), {}),
        (
            dl_comm.ArgumentError,
            "unknown name 'on_stop'.*on_end_epoch",
            (model, loss, optimizer, {"on_stop": print}),
            {},
        ),
        (dl_comm.DTypeError, "on_start is a int", (model, loss, optimizer, {"on_start": 1}), {}),
        (dl_comm.ArgumentError, "prefetch", (model, loss, optimizer), {"prefetch": "no"}),
        (dl_comm.ArgumentError, "group", (model, loss, optimizer), {"group": 1}),
    ):
        with pytest.raises(error, match=text):
            cdl.Engine(*arguments, **options)
    engine = cdl.Engine(model, loss, optimizer)
    with pytest.raises(dl_comm.ArgumentError, match="epochs"):
        engine.train([], -1)
    with pytest.raises(dl_comm.DTypeError, match="iterator is a int"):
        engine.train(3, 1)  # type: ignore[arg-type]
    with pytest.raises(dl_comm.DTypeError, match="not a pair of input and target"):
        engine.train([torch.ones(1, 5)], 1)
    engine.criterion = lambda output, target: output - target
    with pytest.raises(dl_comm.DTypeError, match=r"criterion: it returned \(4, 1\)"):
        engine.train(batches(rank, size), 1)
    engine.criterion = loss

    def broken() -> Iterator[Batch]:
        yield from batches(rank, size, 1)
        raise KeyError("broken file")

    with pytest.raises(KeyError, match="broken file"):
        engine.train(broken(), 1)
    engine.hooks["on_stop"] = print
    with pytest.raises(dl_comm.ArgumentError, match="on_stop"):
        engine.test([])
