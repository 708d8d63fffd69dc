"""The states and the sampler of elastic training with torch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import horovod.torch as hvd
from horovod.torch.elastic import state as states


def of(rank: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer with a moment, which depend on the rank."""
    torch.manual_seed(rank)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
    step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def everything(state: Any) -> Any:
    return copy.deepcopy((state.model.state_dict(), state.optimizer.state_dict(), state.epoch, state.losses))


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(equal, first, second))
    return bool(first == second)


def test_the_state_is_that_of_rank_0_and_returns_to_what_was_saved(rank: int) -> None:
    model, optimizer = of(rank)
    losses = [rank]
    state = hvd.elastic.TorchState(model, optimizer, epoch=rank, losses=losses)
    losses.append(rank + 10)
    state.sync()
    assert rank or state.losses is losses
    first = of(0)
    expected = (first[0].state_dict(), first[1].state_dict(), 0, [0, 10])
    assert equal(everything(state), expected)
    assert state.model is model
    assert state.optimizer is optimizer

    step(model, optimizer)
    state.epoch = 5
    state.losses.append(1)
    state.restore()
    assert equal(everything(state), expected)

    step(model, optimizer)
    state.epoch = 6
    state.losses.append(2)
    state.commit()
    expected = everything(state)
    assert expected[2:] == (6, [0, 10, 2])
    for _ in range(2):
        step(model, optimizer)
        state.losses.clear()
        state.restore()
        assert equal(everything(state), expected)


def test_a_rank_without_objects_takes_those_of_rank_0(rank: int) -> None:
    state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, **({} if rank else {"epoch": 3}))
    state.sync()
    assert state.epoch == 3
    state.epoch = 4
    state.restore()
    assert state.epoch == 3


def test_another_value_is_saved_at_once(rank: int) -> None:
    state = hvd.elastic.TorchState(*of(rank))
    state.model = torch.nn.Linear(1, 1)
    saved = copy.deepcopy(state.model.state_dict())
    torch.nn.init.zeros_(state.model.weight)
    state.restore()
    assert equal(state.model.state_dict(), saved)


@pytest.fixture
def registry() -> Iterator[list[Any]]:
    known = states.get_handler_registry()
    yield known
    states.set_handler_registry(known)


def test_handlers_of_a_script(rank: int, registry: list[Any]) -> None:
    class Handler(states.StateHandler):
        calls: list[str] = []  # noqa: RUF012 - one list for the test

        def save(self) -> None:
            self.calls.append("save")

        def restore(self) -> None:
            self.calls.append("restore")

        def sync(self) -> None:
            self.calls.append("sync")

    states.set_handler_registry([(set, Handler), *registry])
    state = hvd.elastic.TorchState(seen={1})
    assert state.seen == {1}
    state.sync()
    state.restore()
    state.commit()
    assert Handler.calls == ["sync", "restore", "save"]


def test_a_state_of_a_script(rank: int) -> None:
    class Own(hvd.elastic.ObjectState):
        def reset(self) -> None:
            self.was_reset = True

    calls: list[bool] = []
    state = Own(hvd.broadcast_object, hvd.rank, epoch=rank)
    state.register_reset_callbacks([lambda: calls.append(state.was_reset)])
    state.on_reset()
    assert calls == [True]
    state.sync()
    assert state.epoch == 0


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("length", [0, 1, 7, 24])
def test_the_samples_that_are_left_are_dealt_to_all_ranks(size: int, length: int, shuffle: bool) -> None:
    sampler = hvd.elastic.ElasticSampler(range(length), shuffle=shuffle, seed=3)
    state = hvd.elastic.TorchState(sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        done: set[int] = set()
        for batch in range(3):
            left = hvd.allgather_object(list(sampler))
            assert {len(each) for each in left} == {len(sampler)} == {-(-(max(0, length - batch * 2 * size)) // size)}
            assert set().union(*left) == set(range(length)) - done
            done.update(index for each in left for index in each[:2])
            sampler.record_batch(batch, 2)
            state.commit()
            sampler.record_batch(batch, 2)
            state.restore()  # deals the rest, too
    state.sync()
    assert sampler.state_dict() == {"epoch": 1, "processed_num": 6 * size}


def test_the_order_of_samples_is_that_of_the_epoch() -> None:
    sampler = hvd.elastic.ElasticSampler(range(100))
    first = list(sampler)
    assert first == list(sampler)
    sampler.set_epoch(1)
    assert first != list(sampler)


def test_run_says_that_it_comes_later() -> None:
    @hvd.elastic.run
    def train(state: Any) -> None:
        pass

    with pytest.raises(NotImplementedError, match="no elastic training yet"):
        train(hvd.elastic.TorchState())
