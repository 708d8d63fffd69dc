"""Second derivatives through averaged gradients, on 1, 2 and 3 ranks."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import dl_comm.torch as cdl  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4, dtype=torch.float64) for _ in range(2)))


def test_are_those_of_the_mean(rank: int, size: int) -> None:
    p = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = cdl.DistributedOptimizer(torch.optim.SGD([p], lr=0.1))
    middle = (size + 1) / 2
    ((rank + 1) * p**3).sum().backward(create_graph=True)
    assert p.grad is not None
    torch.testing.assert_close(p.grad.detach(), torch.full((3,), 3 * middle, dtype=torch.float64))
    (second,) = torch.autograd.grad(p.grad, p, torch.ones(3, dtype=torch.float64), create_graph=True)
    torch.testing.assert_close(second.detach(), torch.full((3,), 6 * middle, dtype=torch.float64))
    (third,) = torch.autograd.grad(second.sum(), p)
    torch.testing.assert_close(third, torch.full((3,), 6 * middle, dtype=torch.float64))
    optimizer.zero_grad()


@pytest.mark.parametrize("bucket_mb", [None, 1e-9])
def test_a_gradient_penalty(bucket_mb: float | None, rank: int, size: int) -> None:
    """As in one process with the batch of all ranks."""

    def train(model: Any, optimizer: Any, ranks: list[int]) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            losses = []
            for each in ranks:
                x = torch.full((2, 4), each + 1.0, dtype=torch.float64)
                losses.append(model[1](model[0](x).tanh()).pow(2).mean())
            (sum(losses) / len(losses)).backward(create_graph=True)
            sum(p.grad.pow(2).sum() for p in model.parameters()).backward()
            optimizer.step()

    model, single = make_model(), make_model()
    train(single, torch.optim.SGD(single.parameters(), lr=0.1), list(range(size)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, cdl.DistributedOptimizer(optimizer, bucket_mb=bucket_mb), [rank])
    for own, right in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(own.detach(), right.detach())


def test_of_a_parameter_that_a_rank_does_not_use(rank: int, size: int) -> None:
    p, q = (nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2))
    optimizer = cdl.DistributedOptimizer(torch.optim.SGD([p, q], lr=0.1))
    (p**2 + (q**3 if rank == 0 else 0)).sum().backward(create_graph=True)
    assert q.grad is not None
    (second,) = torch.autograd.grad(q.grad.sum(), q)
    torch.testing.assert_close(second, torch.full((2,), 6.0 / size, dtype=torch.float64))
    optimizer.zero_grad()
