"""Schedules of torch's optimizer on 1, 2 and 3 ranks, and two networks on a team each."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dl_comm as mc  # noqa: E402
import dl_comm.torch as cdl  # noqa: E402
import ml_comm.torch  # noqa: E402

pytestmark = pytest.mark.costly

TEAM = 20


def train(optimizer: Any, parameters: list[Any], rank: int, steps: int) -> list[list[float]]:
    """Steps whose gradients are 2**step + rank for each parameter; returns the parameters' way."""
    way = []
    for step in range(steps):
        optimizer.zero_grad()
        sum((p * (2.0**step + rank)).sum() for p in parameters).backward()
        optimizer.step()
        way.append([float(p.detach()[0]) for p in parameters])
    return way


@pytest.mark.parametrize("buckets", ["one bucket", "a bucket each"])
def test_the_optimizer_applies_every_mean_once(buckets: str, rank: int, size: int) -> None:
    steps = 10
    parameters = [torch.nn.Parameter(torch.zeros(4)) for _ in range(3)]
    optimizer = cdl.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=1.0),
        nstep=steps,
        warmup=0.3,
        verb=0,
        team=TEAM + 1,
        bucket_mb=25 if buckets == "one bucket" else 1e-9,
    )
    way = train(optimizer, parameters, rank, steps)
    m = [2.0**step + (size - 1) / 2 for step in range(steps)]
    applied = [m[0], m[1], m[2], m[3], 0.0, m[4], m[5], m[6], m[7], m[8] + m[9]]
    at = 0.0
    for step, parameters_then in enumerate(way):
        at -= applied[step]
        assert parameters_then == [at] * 3, f"step {step}"
    assert mc.check_buffers_match([p.detach() for p in parameters], 1) == 0


@pytest.mark.parametrize("trans_alg", [0, 1])
@pytest.mark.parametrize("ksteps", [0, 3, -7, -12])
def test_no_mean_is_lost_whatever_the_schedule(trans_alg: int, ksteps: int, rank: int, size: int) -> None:
    steps, team = 12, TEAM + 1
    parameters = [torch.nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(3)]
    mc.config_team(team, trans_alg, ksteps, steps)
    optimizer = cdl.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), team=team, bucket_mb=1e-9)
    way = train(optimizer, parameters, rank, steps)
    total = sum(2.0**step + (size - 1) / 2 for step in range(steps))
    assert way[-1] == pytest.approx([-total] * 3, rel=1e-12)


def test_a_change_to_blocking_in_mid_phase(rank: int, size: int) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    optimizer = cdl.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), team=TEAM + 1, bucket_mb=1e-9)
    mc.config_team(TEAM + 1, 0, 0, 100)
    train(optimizer, parameters, rank, 5)
    mc.config_team(TEAM + 1, 0, 1, 1)
    way = train(optimizer, parameters, rank, 3)
    assert way[-1] == [-(31 + 5 * (size - 1) / 2) - (7 + 3 * (size - 1) / 2)] * 2


def test_parameters_that_only_some_ranks_use_stay_alike(rank: int, size: int) -> None:
    """Weight decay and Adam's momentum act on all ranks or on none."""
    for make in (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), lambda p: torch.optim.Adam(p, lr=0.1)):
        common, rare = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
        optimizer = cdl.DistributedOptimizer(make([common, rare]), nstep=8, warmup=0.0, verb=0, team=TEAM + 1)
        for step in range(8):
            optimizer.zero_grad()
            loss = common.sum() + (rare.sum() * (step + 1) if rank == 0 and step % 3 == 0 else 0.0)
            loss.backward()
            optimizer.step()
        assert mc.check_buffers_match([common.detach(), rare.detach()], 1) == 0


def test_parameters_that_are_frozen_in_mid_phase(rank: int, size: int) -> None:
    stays, freezes = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = cdl.DistributedOptimizer(
        torch.optim.SGD([stays, freezes], lr=1.0), nstep=10, warmup=0.0, verb=0, team=TEAM + 1
    )
    for step in range(10):
        freezes.requires_grad_(step < 6)
        optimizer.zero_grad()
        ((stays + freezes) * 2.0**step).sum().backward()
        optimizer.step()
    assert stays.tolist() == [-float(2**10 - 1)] * 2
    assert freezes.tolist() == [-float(2**6 - 1)] * 2


@pytest.mark.parametrize(("trans_alg", "thrown"), [(0, 4), (0, 7), (1, 3), (1, 15), (1, 37)])
def test_a_batch_that_is_thrown_away(trans_alg: int, thrown: int, rank: int, size: int) -> None:
    """Its own mean goes, the one of the step before does not: in the non-blocking phase, at its end, in transitions."""
    steps = 8 if trans_alg == 0 else 40
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    mc.config_team(TEAM + 1, trans_alg, 0, steps)
    optimizer = cdl.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), team=TEAM + 1)
    for step in range(steps + 1):
        optimizer.zero_grad()
        (parameter * (float("nan") if step == thrown else 1.5**step)).sum().backward()
        if step != thrown:
            optimizer.step()
    total = sum(1.5**step for step in range(steps + 1) if step != thrown)
    assert parameter.tolist() == pytest.approx([-total] * 2, rel=1e-12)


def test_parameters_that_are_frozen_but_for_backward(rank: int, size: int) -> None:
    """They are averaged like all; where averages end with the step, they must be unfrozen until it is done."""
    for nstep in (None, 4):
        first, second = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
        optimizer = cdl.DistributedOptimizer(
            torch.optim.SGD([first, second], lr=1.0), nstep=nstep, warmup=0.0, verb=0, team=TEAM + 1
        )
        second.requires_grad_(False)
        for step in range(4):
            optimizer.zero_grad()
            second.requires_grad_(True)
            ((first + second) * (2.0**step + rank)).sum().backward()
            if step == 3:
                second.requires_grad_(False)
            if nstep is not None and step == 3:
                with pytest.raises(mc.StateError, match="group0.parameter1 got a gradient, but was frozen"):
                    optimizer.step()
            else:
                optimizer.step()
            second.requires_grad_(False)
        if nstep is None:
            total = sum(2.0**step + (size - 1) / 2 for step in range(4))
            assert [first.tolist(), second.tolist()] == [[-total] * 2] * 2


def test_views_of_one_tensor_in_several_buckets(rank: int, size: int) -> None:
    flat = torch.zeros(8)
    parameters = [torch.nn.Parameter(torch.zeros(4)) for _ in range(2)]
    parameters[0].grad, parameters[1].grad = flat[:4], flat[4:]
    optimizer = cdl.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), bucket_mb=1e-9)
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        sum((p * (2.0**step + rank)).sum() for p in parameters).backward()
        optimizer.step()
    assert parameters[0].tolist() == parameters[1].tolist() == [-(7 + 3 * (size - 1) / 2)] * 4
    assert parameters[1].grad.data_ptr() == flat[4:].data_ptr()


def test_an_optimizer_that_goes_with_an_average_under_way(rank: int, size: int) -> None:
    """The average may end when it likes: it does not write to the gradients of who comes next."""
    parameter = torch.nn.Parameter(torch.zeros(300_000))
    for _ in range(5):
        optimizer = cdl.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), team=TEAM + 1)
        (parameter * (rank + 1.0)).sum().backward()
        del optimizer
        plain = torch.optim.SGD([parameter], lr=1.0)
        plain.zero_grad(set_to_none=False)
        (parameter * 7.0).sum().backward()
        mc.barrier()
        assert (parameter.grad == 7.0).all()
        parameter.grad = None


@pytest.mark.parametrize("set_to_none", [True, False])
def test_after_an_error_the_gradients_are_not_the_teams(set_to_none: bool, rank: int, size: int) -> None:
    """An error in the script on all ranks is raised, and loses only the mean that it affects."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = cdl.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=1.0), nstep=9, warmup=0.0, verb=0, team=TEAM + 1
    )
    for step in range(9):
        optimizer.zero_grad(set_to_none=set_to_none)
        (parameter * 2.0**step).sum().backward()
        if step == 4:
            parameter.grad.mul_(2.0)
            with pytest.raises(mc.StateError, match="was changed during its allreduce"):
                optimizer.step()
        else:
            optimizer.step()
    assert parameter.tolist() == [-float(2**9 - 1 - 2**4)] * 2


def test_what_needs_its_own_gradient_is_refused(rank: int, size: int) -> None:
    def wrapped(optimizer: Any) -> Any:
        return cdl.DistributedOptimizer(optimizer, nstep=100, warmup=0.5, verb=0, team=TEAM + 1)

    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = wrapped(torch.optim.LBFGS([parameter]))
    with pytest.raises(mc.StateError, match="closure"):
        optimizer.step(lambda: parameter.sum())
    del optimizer
    optimizer = wrapped(torch.optim.SGD([parameter], lr=1.0))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(parameter.sum()).backward()
    with pytest.raises(mc.StateError, match="GradScaler"):
        scaler.step(optimizer)
    optimizer.zero_grad()
    mc.config_team(TEAM + 1, 0, 1, 1)


def test_gradients_that_lie_elsewhere(rank: int, size: int) -> None:
    """Gradients in one flat tensor, a complex one, a channels-last one, and one that only some ranks have."""
    flat = torch.zeros(6)
    laid = torch.nn.Parameter(torch.zeros(6))
    laid.grad = flat[:6]
    complex_ = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    image = torch.nn.Parameter(torch.zeros(1, 2, 3, 4).to(memory_format=torch.channels_last))
    rare = torch.nn.Parameter(torch.zeros(2))
    parameters = [laid, complex_, image, rare]
    optimizer = cdl.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=1.0), nstep=6, warmup=0.0, verb=0, team=TEAM + 2
    )
    for step in range(6):
        optimizer.zero_grad(set_to_none=False)
        scale = 2.0**step + rank
        loss = (laid * scale).sum() + (complex_ * scale).real.sum() + (image * scale).sum()
        if rank == 0:
            loss = loss + (rare * scale * size).sum()
        loss.backward()
        optimizer.step()
    total = sum(2.0**step + (size - 1) / 2 for step in range(6))
    assert laid.tolist() == [-total] * 6
    assert complex_.real.tolist() == [-total] * 3
    assert image.flatten().tolist() == [-total] * 24
    assert rare.tolist() == [-sum(2.0**step for step in range(6))] * 2
    assert laid.grad is not None
    assert laid.grad.data_ptr() == flat.data_ptr(), "a gradient that lies in the script's memory stays there"


def test_a_gan_on_two_teams(rank: int, size: int) -> None:
    """Two optimizers, a team each by themselves; one process on the joined batch ends with the same weights."""

    def networks() -> tuple[Any, Any]:
        torch.manual_seed(5)
        return torch.nn.Linear(3, 4).double(), torch.nn.Linear(4, 1).double()

    def play(generator: Any, discriminator: Any, optimizers: list[Any], noise: Any, real: Any) -> None:
        for z, x in zip(noise, real, strict=True):
            optimizers[1].zero_grad()
            fake = generator(z).detach()
            loss = torch.nn.functional.softplus(discriminator(fake)) + torch.nn.functional.softplus(-discriminator(x))
            loss.mean().backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            torch.nn.functional.softplus(-discriminator(generator(z))).mean().backward()
            optimizers[0].step()

    source = torch.Generator().manual_seed(9)
    noise = torch.rand(6, 2 * size, 3, generator=source, dtype=torch.float64)
    real = torch.rand(6, 2 * size, 4, generator=source, dtype=torch.float64)
    ours, alone = networks(), networks()
    mine = slice(2 * rank, 2 * rank + 2)
    wrapped = [cdl.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), nteam=2) for net in ours]
    play(*ours, wrapped, noise[:, mine], real[:, mine])
    play(*alone, [torch.optim.SGD(net.parameters(), lr=0.1) for net in alone], noise, real)
    for net, expected in zip(ours, alone, strict=True):
        for a, b in zip(net.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_the_first_signature(rank: int, size: int) -> None:
    parameter = torch.nn.Parameter(torch.full((2,), float(rank)))
    optimizer = ml_comm.torch.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), 4, 1, 2, 1.0, 0, 10)
    assert parameter.tolist() == [0.0, 0.0], "broadcast from rank 0"
    m = [2.0**step + (size - 1) / 2 for step in range(4)]
    assert [way[0] for way in train(optimizer, [parameter], rank, 4)] == [-m[0], -sum(m[:2]), -sum(m[:3]), -sum(m)]
    with pytest.raises(mc.ArgumentError, match="warmup"):
        cdl.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]), nstep=5, warmup=2.0)
