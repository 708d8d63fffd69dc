"""Downpour and EASGD on 1, 2 and 3 ranks: what is conserved, whatever the order in which ranks exchange."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch

import dl_comm as mc
import dl_comm.torch as cdl

LR = 0.125


def model(rank: int, dtype: torch.dtype = torch.float64) -> torch.nn.Linear:
    torch.manual_seed(rank)
    made: torch.nn.Linear = torch.nn.Linear(3, 1).to(dtype)  # its bias has fewer elements than there are ranks
    return made


def flat(net: torch.nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().reshape(-1) for each in net.parameters()])


def steps(net: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int, gradient: float, rank: int = 0) -> None:
    """Steps with this gradient of every element, at the pace of this rank."""
    pace = random.Random(rank)
    for _ in range(count):
        for each in net.parameters():
            each.grad = torch.full_like(each, gradient)
        optimizer.step()
        time.sleep(0.002 * pace.random())


@pytest.mark.parametrize("options", [{}, {"prefetch": 3}, {"send_frequency": 4}, {"update_frequency": 1}], ids=str)
def test_downpour_adds_the_changes_of_all_ranks(options: dict[str, int], rank: int, size: int) -> None:
    net = model(rank)
    optimizer = cdl.Downpour(
        torch.optim.SGD(net.parameters(), LR), **{"init_delay": 0, "update_frequency": 5, **options}
    )
    start = flat(net)
    assert torch.equal(start, flat(model(0))), "all start from rank 0's"
    steps(net, optimizer, 23, float(2**rank), rank)
    optimizer.close()
    assert torch.equal(flat(net), start - LR * 23 * (2**size - 1))
    with pytest.raises(mc.StateError, match="was closed"):
        optimizer.step()


def test_the_first_steps_are_of_the_rank_alone(rank: int, size: int) -> None:
    net = model(rank)
    optimizer = cdl.Downpour(torch.optim.SGD(net.parameters(), LR), init_delay=6, update_frequency=4)
    start = flat(net)
    steps(net, optimizer, 6, float(rank + 1))
    assert torch.equal(flat(net), start - LR * 6 * (rank + 1))
    steps(net, optimizer, 9, float(rank + 1))
    optimizer.close()
    # The server began with rank 0's.
    assert torch.equal(flat(net), start - LR * 6 - LR * 9 * sum(range(1, size + 1)))


def test_closed_before_the_server_starts_all_have_rank_0s(rank: int) -> None:
    net = model(rank)
    optimizer = cdl.EASGD(torch.optim.SGD(net.parameters(), LR))
    steps(net, optimizer, 2, float(rank + 1))
    optimizer.close()
    assert torch.equal(flat(net), flat(model(0)) - 2 * LR)


def test_an_exchange_of_easgd_conserves_the_sum(rank: int, size: int) -> None:
    net = model(rank)
    optimizer = cdl.EASGD(torch.optim.SGD(net.parameters(), LR), init_delay=0, update_frequency=1, beta=0.5)
    start = flat(net)
    steps(net, optimizer, 1, 0.0)  # makes the server
    with torch.no_grad():
        for each in net.parameters():
            each += rank + 1
    steps(net, optimizer, 50, 0.0, rank)
    optimizer.state_dict()  # waits for what this rank has sent
    mc.barrier()
    center = torch.cat([each.reshape(-1) for each in optimizer.state_dict()["dl_comm"]["center"]])
    total = mc.allreduce(flat(net)) + center
    torch.testing.assert_close(total, (size + 1) * start + sum(range(1, size + 1)))
    mc.barrier()
    optimizer.close()
    assert torch.equal(flat(net), center)


def test_one_exchange_is_that_of_the_paper(rank: int, size: int) -> None:
    net = model(0)
    optimizer = cdl.EASGD(torch.optim.SGD(net.parameters(), LR), init_delay=0, update_frequency=2, beta=0.75)
    center = flat(net)
    steps(net, optimizer, 2, 1.0 if rank == 0 else 0.0)  # the others stay at the center, unless it has moved
    mc.barrier()
    if rank == 0:
        alpha = 0.75 / size
        torch.testing.assert_close(flat(net), center - LR * 2 * (1 - alpha))
    mc.barrier()
    optimizer.close()


@pytest.mark.parametrize("kind", ["Downpour", "EASGD"])
def test_both_learn(kind: str, rank: int, size: int) -> None:
    net, wanted = model(rank, torch.float32), torch.tensor([[1.0, -2.0, 3.0]])
    optimizer = getattr(cdl, kind)(
        torch.optim.SGD(net.parameters(), 0.05 / size, momentum=0.5), init_delay=5, update_frequency=5
    )
    generator = torch.Generator().manual_seed(rank)
    for _ in range(300):
        inputs = torch.randn(16, 3, generator=generator)
        optimizer.zero_grad()
        loss = (net(inputs) - inputs @ wanted.T).square().mean()
        loss.backward()
        optimizer.step()
        time.sleep(0.0005)
    optimizer.close()
    torch.testing.assert_close(net.weight.detach(), wanted, rtol=0, atol=0.1)
    assert mc.equal_on_all_ranks([each.detach().numpy() for each in net.parameters()])


@pytest.mark.parametrize("kind", ["Downpour", "EASGD"])
def test_a_state_resumes(kind: str, rank: int, size: int) -> None:
    options: dict[str, Any] = {"init_delay": 2, "update_frequency": 3}
    net = model(rank)
    optimizer = getattr(cdl, kind)(torch.optim.SGD(net.parameters(), LR, momentum=0.5), **options)
    steps(net, optimizer, 6, float(rank + 1))
    optimizer.state_dict()  # waits for what this rank has sent
    mc.barrier()
    saved, weights = optimizer.state_dict(), net.state_dict()
    assert saved["dl_comm"]["steps"] == 6
    weights = {name: each.clone() for name, each in weights.items()}
    center = torch.cat([each.reshape(-1) for each in saved["dl_comm"]["center"]])
    mc.barrier()
    optimizer.close()

    other = model(5)
    resumed = getattr(cdl, kind)(torch.optim.SGD(other.parameters(), LR, momentum=0.5), **options)
    other.load_state_dict(weights)
    resumed.load_state_dict(saved)
    steps(other, resumed, 1, 0.0)
    assert resumed.state_dict()["dl_comm"]["steps"] == 7
    with pytest.raises(mc.StateError, match="before the server runs"):
        resumed.load_state_dict(saved)
    mc.barrier()
    if kind == "EASGD":  # no exchange in step 7
        now = torch.cat([each.reshape(-1) for each in resumed.state_dict()["dl_comm"]["center"]])
        assert torch.equal(now, center)
    mc.barrier()
    resumed.close()
    # A state of the original optimizer may be loaded, too.
    again = cdl.Downpour(torch.optim.SGD(other.parameters(), LR, momentum=0.5))
    again.load_state_dict(torch.optim.SGD(model(0).parameters(), LR).state_dict())
    assert again.param_groups[0]["momentum"] == 0
    again.close()


def test_elastic_averaging_over_synchronous_groups(rank: int, size: int) -> None:
    """Rank 0 alone, and the others together."""
    color = min(rank, 1)
    group = mc.split(color, name="together")
    assert group is not None
    net = model(rank)
    inner = cdl.DistributedOptimizer(torch.optim.SGD(net.parameters(), LR), group=group)
    optimizer = cdl.Downpour(inner, init_delay=0, update_frequency=3, group=group)
    start = flat(net)
    assert torch.equal(start, flat(model(0)))
    for _ in range(7):
        optimizer.zero_grad()
        (flat_sum(net) * float(2**rank)).backward()
        optimizer.step()
    assert group.equal_on_all_ranks([each.detach().numpy() for each in net.parameters()])
    optimizer.close()
    others = sum(2.0**each for each in range(1, size)) / max(1, size - 1)
    torch.testing.assert_close(flat(net), start - LR * 7 * (1 + others))
    group.free()


def flat_sum(net: torch.nn.Module) -> torch.Tensor:
    return torch.cat([each.reshape(-1) for each in net.parameters()]).sum()


def test_schedulers_closures_and_types(rank: int, size: int) -> None:
    net = torch.nn.ModuleList([model(0), model(0, torch.float32), model(0, torch.bfloat16)])
    optimizer = cdl.Downpour(torch.optim.SGD(net.parameters(), LR), init_delay=0, update_frequency=1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    start = net[0].weight.detach().clone()

    def closure() -> float:
        optimizer.zero_grad()
        sum(each.sum() for each in net.parameters()).backward()  # type: ignore[union-attr]
        return 7.0

    assert optimizer.step(closure) == 7
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == LR / 2
    optimizer.close()
    torch.testing.assert_close(net[0].weight.detach(), start - LR * size)
    for each in net[1:]:  # type: ignore[index]
        torch.testing.assert_close(each.weight.double(), net[0].weight.double(), rtol=0.01, atol=0.01)


def test_bad_arguments(rank: int) -> None:
    sgd = torch.optim.SGD(model(0).parameters(), LR)
    for options, text in (
        ({"update_frequency": 0}, "update_frequency"),
        ({"init_delay": -1}, "init_delay"),
        ({"prefetch": 11}, "prefetch"),
    ):
        with pytest.raises(mc.ArgumentError, match=text):
            cdl.EASGD(sgd, **options)  # type: ignore[arg-type]
    with pytest.raises(mc.ArgumentError, match="send_frequency"):
        cdl.Downpour(sgd, send_frequency=0)
    for beta in (0.0, 1.5, float("nan")):
        with pytest.raises(mc.ArgumentError, match="beta"):
            cdl.EASGD(sgd, beta=beta)
    with pytest.raises(mc.ArgumentError, match="give an optimizer of torch"):
        cdl.Downpour(model(0))  # type: ignore[arg-type]
    with pytest.raises(mc.ArgumentError, match="floating point"):
        cdl.Downpour(torch.optim.SGD([torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))], LR))
    optimizer = cdl.Downpour(sgd)
    with pytest.raises(mc.StateError, match="add_param_group"):
        optimizer.add_param_group({"params": []})
    optimizer.close()


def test_with_the_engine(rank: int, size: int) -> None:
    """Ranks with different numbers of batches; the engine broadcasts and averages nothing by itself."""
    net = model(rank, torch.float32)
    optimizer = cdl.EASGD(torch.optim.SGD(net.parameters(), 0.05), init_delay=2, update_frequency=3)
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(rank))
    batches = [(inputs, inputs.sum(1, keepdim=True))] * (20 + rank)
    engine = cdl.Engine(net, torch.nn.functional.mse_loss, optimizer)
    first = engine.test(batches).average_loss
    engine.train(batches, 3)
    optimizer.close()
    assert engine.test(batches).average_loss < first / 2
    assert mc.equal_on_all_ranks([each.detach().numpy() for each in net.parameters()])
