"""Ranks with different numbers of batches."""

from __future__ import annotations

import pytest
import torch

import dl_comm as mc
import dl_comm.torch as cdl


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    # Several buckets, whose size the first rounds find by trials.
    model = torch.nn.Sequential(torch.nn.Linear(4, 1000), torch.nn.Linear(1000, 1000), torch.nn.Linear(1000, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + rank))


@pytest.mark.parametrize("state_dict", [True, False])
def test_training_goes_on_after_ranks_have_joined(rank: int, size: int, state_dict: bool) -> None:
    epochs = [[7 + other for other in range(size)], [9 - 2 * other for other in range(size)], [5] * size]
    model, optimizer = make()
    optimizer = cdl.DistributedOptimizer(optimizer)
    reference, plain = make()
    for steps in epochs:
        for step in range(steps[rank]):
            optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()
        last = mc.join()
        assert steps[last] == max(steps)
        if size > 1:
            with pytest.raises(mc.StateError, match="broadcast_parameters"):
                model(batch(rank, 0)).square().mean().backward()
        optimizer.zero_grad()
        cdl.broadcast_parameters(model.state_dict() if state_dict else model, last)

        # One process with all batches: a rank without one contributes zeros.
        for step in range(max(steps)):
            plain.zero_grad()
            active = [other for other in range(size) if steps[other] > step]
            sum(reference(batch(other, step)).square().mean() / size for other in active).backward()  # type: ignore[union-attr]
            plain.step()
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(mine, other, atol=1e-5)


def test_different_numbers_of_steps_are_still_an_error(rank: int, size: int) -> None:
    if size == 1:
        return
    model, optimizer = make()
    optimizer = cdl.DistributedOptimizer(optimizer)
    model(batch(rank, 0)).square().mean().backward()
    if rank > 0:
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(mc.StateError, match="different numbers of steps"):
        model(batch(rank, 1)).square().mean().backward()
