"""Training on GPUs, on any number of ranks: the weights equal those of one process on the joined batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import dl_comm as mc
import dl_comm.torch as cdl
from job import Job

BATCH = 6  # of one rank
# One bucket for each parameter.
TINY = 1e-9
Maker = Callable[..., torch.optim.Optimizer]
MAKERS: dict[str, Maker] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


def make_model(device: torch.device, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Return a small model, the same on every rank."""
    torch.manual_seed(7)
    made = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))
    return made.to(device, dtype)


def batches(job: Job, steps: int, dtype: torch.dtype = torch.float64) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return batches for all ranks together, the same on every rank."""
    generator = torch.Generator().manual_seed(11)
    for _ in range(steps):
        x = torch.rand(BATCH * job.size, 5, generator=generator, dtype=torch.float64)
        y = x.sum(dim=1, keepdim=True).sin()
        yield x.to(job.device, dtype), y.to(job.device, dtype)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of a batch."""
    return (model(x) - y).pow(2).mean()


def part(job: Job, tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a batch."""
    return tensor[job.rank * BATCH : (job.rank + 1) * BATCH]


def wrap(optimizer: torch.optim.Optimizer, **options: object) -> cdl.AveragingOptimizer:
    """Wrap the optimizer, by default on team 0."""
    return cdl.DistributedOptimizer(optimizer, **{"team": 0, "bucket_mb": TINY, **options})


def assert_close(model: nn.Module, expected: nn.Module, tolerance: float = 1e-10) -> None:
    """Fail unless the parameters are close to the expected ones, and bit-identical on all ranks."""
    for (name, a), b in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")
    assert mc.check_buffers_match([p.detach() for p in model.parameters()], 1) == 0


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-4)], ids=["f64", "f32"])
@pytest.mark.parametrize("bucket_mb", [TINY, 1e-4, 25])
@pytest.mark.parametrize("to_none", [True, False], ids=["none", "zeros"])
def test_same_weights(
    job: Job, maker: str, dtype: torch.dtype, tolerance: float, bucket_mb: float, to_none: bool
) -> None:
    model, expected = make_model(job.device, dtype), make_model(job.device, dtype)
    optimizer = wrap(MAKERS[maker](model.parameters()), bucket_mb=bucket_mb)
    reference = MAKERS[maker](expected.parameters())
    for x, y in batches(job, 20, dtype):
        optimizer.zero_grad(set_to_none=to_none)
        loss_of(model, part(job, x), part(job, y)).backward()
        optimizer.step()
        reference.zero_grad()
        loss_of(expected, x, y).backward()
        reference.step()
    assert_close(model, expected, tolerance)


def test_accumulation_and_clipping(job: Job) -> None:
    model, expected = make_model(job.device), make_model(job.device)
    optimizer = wrap(MAKERS["SGD"](model.parameters()), backward_passes_per_step=2)
    reference = MAKERS["SGD"](expected.parameters())
    for step, (x, y) in enumerate(batches(job, 12)):
        if step % 2 == 0:
            optimizer.zero_grad()
            reference.zero_grad()
        loss_of(model, part(job, x), part(job, y)).backward()
        loss_of(expected, x, y).backward()
        if step % 2 == 1:
            optimizer.synchronize()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(expected.parameters(), 0.05))
            reference.step()
    assert_close(model, expected)


def test_parameters_that_a_rank_does_not_use(job: Job) -> None:
    """A missing gradient counts as zero; one that is missing on all ranks stays None."""
    used = [nn.Parameter(torch.ones(4, device=job.device)) for _ in range(3)]
    optimizer = wrap(torch.optim.SGD(used, lr=1.0), bucket_mb=25)
    for _ in range(3):
        optimizer.zero_grad()
        loss = used[0].sum()
        if job.rank == 0:
            loss = loss + used[1].sum() * job.size
        loss.backward()
        optimizer.step()
    assert [float(p[0].detach()) for p in used] == [-2.0, -2.0, 1.0]
    assert used[2].grad is None


@pytest.mark.parametrize("buckets", [TINY, 25])
@pytest.mark.parametrize("warmup", [0.0, 0.4])
def test_non_blocking_steps(job: Job, buckets: float, warmup: float) -> None:
    """A schedule applies the same means to GPU and host tensors, at the same steps."""
    ways = []
    for team, device in ((50, torch.device("cpu")), (51, job.device)):
        torch.manual_seed(job.rank)
        parameters = [nn.Parameter(torch.zeros(n, dtype=torch.float64, device=device)) for n in (4, 50_000, 7)]
        optimizer = wrap(
            torch.optim.SGD(parameters, lr=1.0), team=team, bucket_mb=buckets, nstep=10, warmup=warmup, verb=0
        )
        way = []
        for step in range(10):
            optimizer.zero_grad()
            sum((p * (2.0**step + job.rank)).sum() for p in parameters).backward()
            optimizer.step()
            assert all(bool((p == p[0]).all()) for p in parameters)
            way.append([float(p[0].detach()) for p in parameters])
        assert mc.check_buffers_match([p.detach() for p in parameters], 1) == 0
        ways.append(way)
    assert ways[0] == ways[1]


def test_a_schedule_is_for_the_optimizer(job: Job) -> None:
    """The function refuses GPU tensors on a team with non-blocking calls; the next call on another team works."""
    mc.config_team(52, 0, 0, 100)
    tensors = [torch.ones(3, device=job.device)]
    if job.on_gpu:
        with pytest.raises(mc.ArgumentError, match="dl_comm.torch's optimizer"):
            cdl.gradients(tensors, 52)
    else:
        cdl.gradients(tensors, 52)
    assert cdl.gradients(tensors, 0)[0].tolist() == [1.0] * 3


def test_autograd(job: Job) -> None:
    """The gradient of a mean is the mean of the gradients."""
    x = torch.ones(2, 3, device=job.device, requires_grad=True)
    y = torch.ones(4, device=job.device, requires_grad=True)
    mean_x, mean_y = cdl.gradients([x * (job.rank + 1), y], 0)
    ((job.rank + 2) * mean_x.sum() + job.rank * mean_y.sum()).backward()
    torch.testing.assert_close(x.grad.cpu(), torch.full((2, 3), (job.rank + 1) * (job.middle + 2)))
    torch.testing.assert_close(y.grad.cpu(), torch.full((4,), job.middle))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_loss_scaling(job: Job, dtype: torch.dtype) -> None:
    """An overflow on one rank makes all ranks skip the step."""
    model = make_model(job.device, torch.float32)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), bucket_mb=25)
    scaler = torch.amp.GradScaler(job.device.type, init_scale=1024.0)
    for step, (x, y) in enumerate(batches(job, 4, torch.float32)):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        with torch.autocast(job.device.type, dtype=dtype, enabled=job.on_gpu and dtype == torch.float16):
            loss = loss_of(model, part(job, x), part(job, y))
        if step == 1 and job.rank == job.size - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        unchanged = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert unchanged == (step == 1)
    assert scaler.get_scale() == 512.0
    assert mc.check_buffers_match([p.detach() for p in model.parameters()], 1) == 0
