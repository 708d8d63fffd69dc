"""Averages end with backward: the contract of stock DDP, on 1, 2 and 3 ranks."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import dl_comm  # noqa: E402
import dl_comm.torch as cdl  # noqa: E402
from dl_comm.torch import _backward  # noqa: E402

BATCH = 4  # of one rank
TINY = 1e-9  # a bucket for each parameter


def make_model(seed: int = 3) -> nn.Sequential:
    """Return a small model, the same one on every rank for the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def batch(step: int, size: int) -> torch.Tensor:
    """Return the inputs of all ranks in a step, the same on every rank."""
    return torch.rand(BATCH * size, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def mine(x: torch.Tensor, rank: int) -> torch.Tensor:
    """Return this rank's part of a batch."""
    return x[rank * BATCH : (rank + 1) * BATCH]


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of a batch."""
    return (model(x) - x.sum(dim=1, keepdim=True).sin()).pow(2).mean()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Return the gradients, which all parameters have."""
    return [parameter.grad for parameter in model.parameters()]


def assert_close(some: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    """Fail unless tensors differ by rounding only."""
    for one, other in zip(some, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def mean_rank(size: int) -> float:
    """Return the mean of rank + 1."""
    return (size + 1) / 2


# What scripts of DDP do with gradients between backward and step().


def clip_the_norm(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def clamp_the_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad.data.clamp_(-0.01, 0.01)


def replace(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.grad / parameter.grad.norm()


def drop_some(model: nn.Module) -> None:
    next(model.parameters()).grad = None


def write_through_numpy(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad.numpy()[...] *= 0.5


@pytest.mark.parametrize("bucket_mb", [TINY, None])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("change", [clip_the_norm, clamp_the_data, replace, drop_some, write_through_numpy])
def test_gradients_may_be_changed(
    change: Callable[[nn.Module], None], set_to_none: bool, bucket_mb: float | None, rank: int, size: int
) -> None:
    model, alone = make_model(), make_model()
    optimizer = cdl.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), team=0, bucket_mb=bucket_mb
    )
    reference = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step in range(8):
        x = batch(step, size)
        optimizer.zero_grad(set_to_none)
        loss_of(model, mine(x, rank)).backward()
        reference.zero_grad(set_to_none)
        loss_of(alone, x).backward()
        assert_close(gradients(model), gradients(alone))
        change(model)
        change(alone)
        optimizer.step()
        reference.step()
    assert_close(list(model.parameters()), list(alone.parameters()))
    assert dl_comm.check_buffers_match(list(model.parameters()), 1) == 0


@pytest.mark.parametrize("clear", [True, False])
def test_several_backwards_before_a_step(clear: bool, rank: int, size: int) -> None:
    model, alone = make_model(), make_model()
    optimizer = cdl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), team=0, bucket_mb=TINY)
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(4):
        for part in range(3):
            x = batch(3 * step + part, size)
            loss_of(model, mine(x, rank)).backward()
            loss_of(alone, x).backward()
            assert_close(gradients(model), gradients(alone))
        optimizer.step()
        reference.step()
        if clear:  # else the sum goes on, also over steps
            model.zero_grad()
            alone.zero_grad()
    assert_close(list(model.parameters()), list(alone.parameters()))


def test_a_local_backward_after_an_averaged_one(rank: int, size: int) -> None:
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = cdl.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), team=0)
    for synchronize in (True, False):
        optimizer.zero_grad()
        before = parameter.detach().clone()
        (parameter * (rank + 1)).sum().backward()
        with optimizer.no_sync():
            (parameter * 10 * (rank + 1)).sum().backward()
        torch.testing.assert_close(parameter.grad, torch.full((3,), mean_rank(size) + 10 * (rank + 1)))
        if synchronize:
            optimizer.synchronize()
            optimizer.synchronize()  # is done
            torch.testing.assert_close(parameter.grad, torch.full((3,), 11 * mean_rank(size)))
        optimizer.step()
        torch.testing.assert_close(parameter.detach(), before - 11 * mean_rank(size))


def test_the_passes_of_one_step(rank: int, size: int) -> None:
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = cdl.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), team=0, backward_passes_per_step=2)
    for _ in range(2):
        optimizer.zero_grad()
        (parameter * (rank + 1)).sum().backward()
        torch.testing.assert_close(parameter.grad, torch.full((3,), rank + 1.0))
        (parameter * (rank + 1)).sum().backward()
        torch.testing.assert_close(parameter.grad, torch.full((3,), 2 * mean_rank(size)))
        optimizer.step()


def test_a_gan_of_the_tutorial(rank: int, size: int) -> None:
    """Two backwards of the discriminator, and one of the generator that goes through it."""

    def networks() -> list[nn.Module]:
        torch.manual_seed(5)
        return [nn.Linear(3, 4).double(), nn.Linear(4, 1).double()]

    def play(generator: Any, discriminator: Any, optimizers: list[Any], noise: Any, real: Any) -> None:
        softplus = torch.nn.functional.softplus
        for z, x in zip(noise, real, strict=True):
            discriminator.zero_grad()
            softplus(-discriminator(x)).mean().backward()
            fake = generator(z)
            softplus(discriminator(fake.detach())).mean().backward()
            optimizers[1].step()
            generator.zero_grad()
            softplus(-discriminator(fake)).mean().backward()
            optimizers[0].step()

    source = torch.Generator().manual_seed(9)
    noise = torch.rand(6, 2 * size, 3, generator=source, dtype=torch.float64)
    real = torch.rand(6, 2 * size, 4, generator=source, dtype=torch.float64)
    ours, alone = networks(), networks()
    part = slice(2 * rank, 2 * rank + 2)
    wrapped = [cdl.DistributedOptimizer(torch.optim.Adam(net.parameters(), lr=0.1)) for net in ours]
    play(*ours, wrapped, noise[:, part], real[:, part])
    play(*alone, [torch.optim.Adam(net.parameters(), lr=0.1) for net in alone], noise, real)
    for net, expected in zip(ours, alone, strict=True):
        assert_close(list(net.parameters()), list(expected.parameters()))


def test_a_rank_whose_backward_uses_only_some_parameters(rank: int, size: int) -> None:
    every, first, none = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    optimizer = cdl.DistributedOptimizer(torch.optim.SGD([every, first, none], lr=1.0), team=0, bucket_mb=TINY)
    for _ in range(3):
        optimizer.zero_grad()
        loss = (every * (rank + 1)).sum() + (first.sum() * size if rank == 0 else 0.0)
        loss.backward()
        torch.testing.assert_close(every.grad, torch.full((2,), mean_rank(size)))
        torch.testing.assert_close(first.grad, torch.ones(2))
        assert none.grad is None
        optimizer.step()


def test_several_optimizers_on_one_team(rank: int, size: int) -> None:
    """Ranks end the averages of one backward in different orders, each with parameters that only others use."""
    parameters = [[nn.Parameter(torch.zeros(2)) for _ in range(2)] for _ in range(3)]
    optimizers = [
        cdl.DistributedOptimizer(torch.optim.SGD(pair, lr=1.0), team=0, bucket_mb=TINY) for pair in parameters
    ]
    order = parameters if rank % 2 else parameters[::-1]
    total = torch.zeros(())
    for both in order:
        # Added terms come in reverse order of their addition.
        total = total + both[0].sum() * (rank + 1) + (both[1].sum() * size if rank == 0 else 0.0)
    total.backward()
    for optimizer, both in zip(optimizers, parameters, strict=True):
        torch.testing.assert_close(both[0].grad, torch.full((2,), mean_rank(size)))
        torch.testing.assert_close(both[1].grad, torch.ones(2))
        optimizer.step()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_layers(use_reentrant: bool, shared: bool, rank: int, size: int) -> None:
    """A reentrant checkpoint is a backward pass inside another one."""

    def networks() -> list[nn.Linear]:
        torch.manual_seed(8)
        layers = [nn.Linear(5, 5).double() for _ in range(3)]
        return [layers[0], layers[0], layers[0]] if shared else layers

    def backward(layers: list[nn.Linear], x: torch.Tensor) -> None:
        x = x.clone().requires_grad_()
        for layer in layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=use_reentrant))
        x.pow(2).mean().backward()

    ours, alone = networks(), networks()
    kept = nn.ModuleList(dict.fromkeys(ours))
    optimizer = cdl.DistributedOptimizer(torch.optim.SGD(kept.parameters(), lr=0.1), team=0, bucket_mb=TINY)
    for step in range(3):
        optimizer.zero_grad()
        backward(ours, mine(batch(step, size), rank))
        nn.ModuleList(dict.fromkeys(alone)).zero_grad()
        backward(alone, batch(step, size))
        assert_close(gradients(kept), gradients(nn.ModuleList(dict.fromkeys(alone))))
        optimizer.step()
        with torch.no_grad():
            for parameter in nn.ModuleList(dict.fromkeys(alone)).parameters():
                parameter -= 0.1 * parameter.grad


def test_a_shared_layer_checkpointed_within_a_round(rank: int, size: int) -> None:
    """The layer's average has started when the second inner pass adds to its gradient: an error."""
    head, layer = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = cdl.DistributedOptimizer(
        torch.optim.SGD([*layer.parameters(), *head.parameters()], lr=1.0), team=0, bucket_mb=TINY
    )
    x = torch.ones(1, 2, requires_grad=True)
    for _ in range(2):
        x = checkpoint(layer, x, use_reentrant=True)
    with pytest.raises(dl_comm.StateError, match="use_reentrant=False"):
        head(x).sum().backward()
    optimizer.zero_grad()
    (head(layer(torch.ones(1, 2))).sum() * (rank + 1)).backward()
    torch.testing.assert_close(head.bias.grad, torch.full((2,), mean_rank(size)))
    optimizer.step()


class Failing(torch.autograd.Function):
    """The identity, whose backward fails."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> torch.Tensor:
        raise KeyError("bad batch")


@pytest.mark.parametrize("clear", [True, False])
def test_a_backward_that_fails(clear: bool, rank: int, size: int) -> None:
    first, last = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = cdl.DistributedOptimizer(
        torch.optim.SGD([*first.parameters(), *last.parameters()], lr=1.0), team=0, bucket_mb=TINY
    )
    loss = last(Failing.apply(first(torch.ones(1, 2)))).sum()
    with pytest.raises(KeyError, match="bad batch"):
        loss.backward()
    if not clear:
        with pytest.raises(dl_comm.StateError, match=r"failed, .* zero_grad\(\)"):
            first(torch.ones(1, 2)).sum().backward()
    optimizer.zero_grad()
    (last(first(torch.ones(1, 2))).sum() * (rank + 1)).backward()
    torch.testing.assert_close(last.bias.grad, torch.full((2,), mean_rank(size)))
    optimizer.step()


def test_a_step_that_one_rank_leaves_out(rank: int, size: int) -> None:
    """Its parameters differ from then on, which all ranks hear at the next average."""
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = cdl.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), team=0)
    for step in range(3):
        optimizer.zero_grad()
        loss = (parameter * (float("nan") if (rank, step) == (0, 1) else 1.0)).sum()
        if step == 2 and size > 1:
            with pytest.raises(dl_comm.StateError, match=rf"different numbers of steps .*this one {2 - (rank == 0)}"):
                loss.backward()
            return
        loss.backward()
        if torch.isfinite(loss):
            optimizer.step()


def test_steps_that_all_ranks_leave_out(rank: int, size: int) -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = cdl.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), team=0)
    for step in range(9):
        optimizer.zero_grad()
        (parameter * (rank + 1)).sum().backward()
        if step % 4:
            optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.full((2,), 1 - 6 * mean_rank(size)))


def test_a_scaler_needs_averages(rank: int, size: int) -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = cdl.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), team=0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with optimizer.no_sync():
        scaler.scale((parameter * (rank + 1)).sum()).backward()
    with pytest.raises(dl_comm.StateError, match=r"optimizer.synchronize\(\) before the GradScaler"):
        scaler.step(optimizer)
    optimizer.synchronize()
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(parameter.detach(), torch.full((2,), 1 - mean_rank(size)))


def test_a_torch_without_the_engines_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    spec = importlib.util.spec_from_file_location("_another_backward", _backward.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(dl_comm.CommError, match=r"torch .* has no _current_graph_task_id"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
