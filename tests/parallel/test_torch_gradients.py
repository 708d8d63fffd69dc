"""The gradients that DistributedOptimizer averages: whose memory they lie in, who changes them, who else averages."""

from __future__ import annotations

import gc
import re
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import dl_comm  # noqa: E402
import dl_comm.torch as cdl  # noqa: E402
from dl_comm._job import state  # noqa: E402
from dl_comm.torch import _ops  # noqa: E402


def wrap(parameters: Any, **options: Any) -> cdl.AveragingOptimizer:
    """Wrap SGD with rate 1, so that a step subtracts the mean gradient."""
    return cdl.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), **{"team": 0, **options})


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """Return a parameter of zeros."""
    return nn.Parameter(torch.zeros(*shape, dtype=dtype))


def mean_rank(size: int, power: int = 1) -> float:
    """Return the mean of (rank + 1) ** power."""
    return sum((r + 1) ** power for r in range(size)) / size


class TestMemory:
    def test_a_gradient_that_backward_still_reads(self, monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
        # The gradient of `a` is a view of the one that the product has yet to read for `w`. Its average ends at once.
        start, wait, ended = _ops.average_start, _ops.wait, []

        def start_and_wait(*arguments: Any) -> int:
            wait(start(*arguments))
            ended.append(len(ended))
            return ended[-1]

        monkeypatch.setattr(_ops, "average_start", start_and_wait)
        monkeypatch.setattr(_ops, "wait", lambda _: ([], 1.0, 0.0))
        monkeypatch.setattr(_ops, "detach", lambda _: None)
        w, a = zeros(64), zeros(32, 2)
        optimizer = wrap([w, a], bucket_mb=1e-9)
        x = torch.full((64,), rank + 1.0)
        f = torch.full((64,), rank + 1.0)
        ((w * f + a.view(-1)) * x).sum().backward()
        assert len(ended) == 2
        optimizer.step()
        torch.testing.assert_close(w.detach(), torch.full((64,), -mean_rank(size, 2)))
        torch.testing.assert_close(a.detach(), torch.full((32, 2), -mean_rank(size)))

    def test_two_gradients_in_one_memory(self, rank: int, size: int) -> None:
        a, b = zeros(4, 2), zeros(4, 2)
        optimizer = wrap([a, b])
        for step in range(1, 4):
            ((a.view(-1) + b.view(-1)) * torch.full((8,), rank + 1.0)).sum().backward()
            optimizer.step()
            for parameter in (a, b):
                torch.testing.assert_close(parameter.detach(), torch.full((4, 2), -step * mean_rank(size)))
            optimizer.zero_grad()

    def test_on_one_rank_only(self, rank: int, size: int) -> None:
        # Rank 0 has both gradients in one memory, the others have not.
        a, b = zeros(4, 2), zeros(4, 2)
        optimizer = wrap([a, b])
        if rank == 0:
            (a.view(-1) + b.view(-1)).sum().backward()
        else:
            (a.sum() * (rank + 1) + b.sum() * 3 * (rank + 1)).backward()
        optimizer.step()
        torch.testing.assert_close(a.detach(), torch.full((4, 2), -mean_rank(size)))
        torch.testing.assert_close(b.detach(), torch.full((4, 2), -(3 * mean_rank(size) - 2 / size)))

    def test_a_tensor_of_the_script_stays_as_it_is(self, rank: int) -> None:
        parameter = zeros(3, 2)
        optimizer = wrap([parameter])
        upstream = torch.full((6,), float(rank))
        parameter.view(-1).backward(upstream)
        optimizer.step()
        assert torch.equal(upstream, torch.full((6,), float(rank)))

    def test_gradients_laid_out_in_one_tensor(self, rank: int, size: int) -> None:
        a, b = zeros(3), zeros(2, 2)
        flat = torch.zeros(7)
        a.grad, b.grad = flat[:3], flat[3:].view(2, 2)
        optimizer = wrap([a, b])
        for step in range(1, 4):
            ((a.sum() + 2 * b.sum()) * (rank + 1)).backward()
            optimizer.step()
            torch.testing.assert_close(flat, torch.tensor([1.0] * 3 + [2.0] * 4) * mean_rank(size))
            torch.testing.assert_close(b.detach(), torch.full((2, 2), -2 * step * mean_rank(size)))
            optimizer.zero_grad(set_to_none=False)
        assert a.grad.data_ptr() == flat.data_ptr()

    def test_an_expanded_gradient(self, rank: int, size: int) -> None:
        parameter = zeros(3)
        optimizer = wrap([parameter])
        parameter.grad = torch.full((1,), rank + 1.0).expand(3)
        optimizer.step()
        torch.testing.assert_close(parameter.detach(), torch.full((3,), -mean_rank(size)))

    def test_an_ordinary_gradient_is_averaged_where_it_lies(self, rank: int, size: int) -> None:
        layer = nn.Linear(3, 2)
        optimizer = wrap(layer.parameters())
        layer(torch.full((4, 3), rank + 1.0)).sum().backward()
        mine = layer.weight.grad
        optimizer.synchronize()
        assert layer.weight.grad is mine
        torch.testing.assert_close(mine, torch.full((2, 3), 4 * mean_rank(size)))

    def test_complex_parameters(self, rank: int, size: int) -> None:
        a, b = zeros(3, dtype=torch.complex64), zeros(2, dtype=torch.complex128)
        optimizer = wrap([a, b])
        for step in range(1, 3):
            ((a * (1 + 2j)).sum().real * (rank + 1)).backward()
            b.grad = torch.full((2,), 3.0 + 1j * rank, dtype=torch.complex128).conj()  # pending
            optimizer.step()
            torch.testing.assert_close(a.detach(), torch.full((3,), -(1 - 2j) * step * mean_rank(size)))
            torch.testing.assert_close(b.detach(), torch.full_like(b, (-3 + 1j * (size - 1) / 2) * step).detach())
            optimizer.zero_grad()


class TestChanges:
    """What changes gradients before backward has ended is an error that names the parameter; the next step works."""

    def wrapped(self, **options: Any) -> tuple[nn.Linear, cdl.AveragingOptimizer]:
        layer = nn.Linear(3, 2)
        return layer, wrap(layer.parameters(), named_parameters=layer.named_parameters(), **options)

    def goes_on(self, layer: nn.Linear, optimizer: cdl.AveragingOptimizer, rank: int, size: int) -> None:
        layer.zero_grad()
        before = layer.bias.detach().clone()
        (layer(torch.ones(1, 3)).sum() * (rank + 1)).backward()
        optimizer.step()
        torch.testing.assert_close(layer.bias.detach(), before - mean_rank(size))

    def test_a_hook_that_changes_a_gradient(self, rank: int, size: int) -> None:
        layer, optimizer = self.wrapped()
        hook = layer.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad / 2))
        with pytest.raises(dl_comm.StateError, match=r"gradient of weight was changed .*after backward\(\)"):
            layer(torch.full((1, 3), 5.0)).sum().backward()
        hook.remove()
        self.goes_on(layer, optimizer, rank, size)

    def test_gradients_thrown_away(self, rank: int, size: int) -> None:
        layer, optimizer = self.wrapped()
        layer(torch.full((1, 3), 5.0)).sum().backward()
        layer.zero_grad()
        optimizer.zero_grad()
        self.goes_on(layer, optimizer, rank, size)

    @pytest.mark.parametrize("fused", [False, True])
    @pytest.mark.parametrize("clip", [False, True])
    def test_a_scaler_waits_by_itself(self, rank: int, size: int, fused: bool, clip: bool) -> None:
        torch.manual_seed(3)
        layer = nn.Linear(3, 2)
        optimizer = cdl.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=1.0, fused=fused), team=0)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            before = layer.bias.detach().clone()
            overflow = step == 2
            loss = layer(torch.ones(1, 3)).sum() * (rank + 1)
            if overflow and rank == 0:  # one rank overflows: all leave the step out
                loss = loss * float("inf")
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_value_(layer.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            change = 0.0 if overflow else 0.5 if clip else mean_rank(size)
            torch.testing.assert_close(layer.bias.detach(), before - change)
        assert scaler.get_scale() == 512.0


class TestNames:
    """The names of parameters in messages, here in the one about a second owner."""

    def refused_as(self, parameters: list[torch.nn.Parameter]) -> str:
        with pytest.raises(dl_comm.ArgumentError, match="averages .* already") as refused:
            wrap(parameters)
        return re.findall(r"averages (\S+) already", str(refused.value))[0]

    def test_are_those_in_the_outermost_module(self) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 1)))
        optimizer = wrap(list(model.parameters()))
        assert self.refused_as([model[1][0].bias]) == "1.0.bias"
        again = torch.nn.ModuleDict({"a_longer_name": model})
        assert self.refused_as([model[1][0].weight]) == "a_longer_name.1.0.weight"
        del optimizer, again

    def test_a_parameter_without_a_module(self) -> None:
        class Unfinished(torch.nn.Module):
            def __init__(self) -> None:
                self.made = True  # before torch's constructor

        alone, unfinished = zeros(2), Unfinished.__new__(Unfinished)
        optimizer = wrap([alone])
        assert self.refused_as([alone]) == "group0.parameter0"
        del optimizer, unfinished


class TestOwners:
    def test_a_parameter_of_two_optimizers(self, rank: int, size: int) -> None:
        a, b = zeros(2), zeros(2)
        first = wrap([a])
        with pytest.raises(dl_comm.ArgumentError, match="averages shared already"):
            wrap([b, a], named_parameters={"own": b, "shared": a})
        other = wrap([b])
        with pytest.raises(dl_comm.ArgumentError, match=r"averages group1.parameter0 already"):
            other.add_param_group({"params": [a]})
        assert len(other.param_groups) == 1
        ((a.sum() + b.sum()) * (rank + 1)).backward()
        first.step()
        other.step()
        for parameter in (a, b):
            torch.testing.assert_close(parameter.detach(), torch.full((2,), -mean_rank(size)))

    def test_after_the_first_has_gone(self, rank: int, size: int) -> None:
        parameter = zeros(2)
        optimizer = wrap([parameter])
        ring: list[Any] = [optimizer]
        ring.append(ring)  # only the garbage collector can free it
        gc.disable()
        try:
            del optimizer, ring
            optimizer = wrap([parameter])
        finally:
            gc.enable()
        (parameter * (rank + 1)).sum().backward()
        optimizer.step()
        torch.testing.assert_close(parameter.detach(), torch.full((2,), -mean_rank(size)))

    def test_a_wrap_that_failed_keeps_nothing(self, rank: int, size: int) -> None:
        if size == 1:
            pytest.skip("needs two ranks")
        layer = nn.Linear(2 + (rank == 0), 2)
        with pytest.raises(dl_comm.MismatchError) as failure:
            wrap(layer.parameters())
        assert failure.tb is not None  # its frames hold what was made
        wrap(layer.parameters(), broadcast=False)

    @pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
    def test_a_parameter_twice_in_a_group(self, rank: int, size: int) -> None:
        a, b = zeros(2), zeros(3)
        optimizer = wrap([a, b, a])
        (a.sum() * (rank + 1) + b.sum()).backward()
        optimizer.step()
        torch.testing.assert_close(a.detach(), torch.full((2,), -2 * mean_rank(size)))  # two updates, as torch does
        torch.testing.assert_close(b.detach(), torch.full((3,), -1.0))

    @pytest.mark.costly
    def test_more_optimizers_than_teams(self, rank: int, size: int) -> None:
        parameters = [zeros(2) for _ in range(70)]
        optimizers = [cdl.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), broadcast=False) for p in parameters]
        sum(p.sum() * (rank + 1 + i) for i, p in enumerate(parameters)).backward()
        for optimizer in optimizers[:: 1 if rank % 2 else -1]:
            optimizer.step()
        for i, parameter in enumerate(parameters):
            torch.testing.assert_close(parameter.detach(), torch.full((2,), -mean_rank(size) - i))

    def test_ranks_that_made_other_optimizers(self, monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
        if size == 1:
            pytest.skip("needs two ranks")
        parameter = zeros(2)
        with monkeypatch.context() as patch:
            patch.setattr(state.current, "optimizers", state.current.optimizers + rank)
            with pytest.raises(dl_comm.MismatchError, match="SGD"):
                wrap([parameter], broadcast=False)


class TestCompiler:
    def test_compiled_step(self, rank: int, size: int) -> None:
        layer = nn.Linear(3, 2)
        optimizer = wrap(layer.parameters())
        step = torch.compile(lambda: optimizer.step(), backend="aot_eager")
        for _ in range(3):
            optimizer.zero_grad()
            before = layer.bias.detach().clone()
            (layer(torch.ones(1, 3)).sum() * (rank + 1)).backward()
            step()
            torch.testing.assert_close(layer.bias.detach(), before - mean_rank(size))

    def test_compiled_training_step(self, rank: int, size: int) -> None:
        layer = nn.Linear(3, 2)
        optimizer = wrap(layer.parameters(), bucket_mb=1e-9)

        @torch.compile(backend="aot_eager")
        def train(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = layer(x).sum()
            loss.backward()
            optimizer.step()
            return loss

        for _ in range(3):
            before = layer.weight.detach().clone()
            train(torch.full((1, 3), rank + 1.0))
            torch.testing.assert_close(layer.weight.detach(), before - mean_rank(size))
