"""DistributedOptimizer on 1, 2 or 3 ranks: the same weights as one process, whatever the script does."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import dl_comm  # noqa: E402
import dl_comm.torch as cdl  # noqa: E402
from dl_comm.torch import _ops  # noqa: E402

pytestmark = pytest.mark.costly

BATCH = 6  # of one rank
# A bucket for each parameter: most calls, and every rule of their order is at work.
TINY = 1e-9


def make_model(dtype: torch.dtype = torch.float64, seed: int = 7) -> nn.Sequential:
    """Return a small model; the same one on every rank for the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)


def batches(steps: int, size: int, dtype: torch.dtype = torch.float64) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return batches for all ranks together; the same on every rank."""
    generator = torch.Generator().manual_seed(11)
    for _ in range(steps):
        x = torch.rand(BATCH * size, 5, generator=generator, dtype=torch.float64)
        yield x.to(dtype), x.sum(dim=1, keepdim=True).sin().to(dtype)


def part(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the part of a batch that is this rank's."""
    return tensor[rank * BATCH : (rank + 1) * BATCH]


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of a batch."""
    return (model(x) - y).pow(2).mean()


def assert_same_everywhere(model: nn.Module) -> None:
    """Fail unless the parameters have the same bits on all ranks."""
    assert dl_comm.check_buffers_match([p.detach().float().numpy() for p in model.parameters()], 1) == 0


def assert_close(model: nn.Module, expected: nn.Module, tolerance: float = 1e-10) -> None:
    """Fail unless two models have nearly the same parameters."""
    for (name, a), b in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


def wrap(optimizer: torch.optim.Optimizer, **options: Any) -> cdl.AveragingOptimizer:
    """Wrap on a team that exists, with a bucket for each parameter, unless the test says otherwise."""
    return cdl.DistributedOptimizer(optimizer, **{"team": 0, "bucket_mb": TINY, **options})


MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "Nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
}


class TestParity:
    """N ranks with batch B reach the weights of one process with batch N * B.

    The mean of the ranks' gradients is the gradient of the whole batch; only the order of the additions differs, which
    moves each gradient by a few units in the last place of its largest terms. The models contract such differences or
    let them grow by a modest factor in 20 steps: 1e-10 in float64 (unit 2e-16) and 2e-4 in float32 (unit 1.2e-7) are
    far above them and far below what one wrong gradient does (1e-2).
    """

    @pytest.mark.parametrize("maker", MAKERS)
    @pytest.mark.parametrize(
        ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-4)], ids=["f64", "f32"]
    )
    @pytest.mark.parametrize("bucket_mb", [TINY, 1e-4, 25])
    def test_same_weights(
        self, rank: int, size: int, maker: str, dtype: torch.dtype, tolerance: float, bucket_mb: float
    ) -> None:
        model, expected = make_model(dtype), make_model(dtype)
        optimizer = wrap(MAKERS[maker](model.parameters()), bucket_mb=bucket_mb)
        reference = MAKERS[maker](expected.parameters())
        for x, y in batches(20, size, dtype):
            optimizer.zero_grad()
            loss_of(model, part(x, rank), part(y, rank)).backward()
            optimizer.step()
            reference.zero_grad()
            loss_of(expected, x, y).backward()
            reference.step()
        assert_close(model, expected, tolerance)
        assert_same_everywhere(model)

    def test_groups_schedulers_and_zeroed_gradients(self, rank: int, size: int) -> None:
        def make(model: nn.Sequential) -> torch.optim.Optimizer:
            groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.05, "momentum": 0.5}]
            return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

        model, expected = make_model(), make_model()
        plain = make(model)
        early = torch.optim.lr_scheduler.StepLR(plain, 3, gamma=0.5)  # made before wrapping
        optimizer = wrap(plain)
        late = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        reference = make(expected)
        schedulers = [torch.optim.lr_scheduler.StepLR(reference, 3, gamma=0.5)]
        schedulers.append(torch.optim.lr_scheduler.ExponentialLR(reference, 0.9))
        for step, (x, y) in enumerate(batches(12, size)):
            if step == 4:
                optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 0.2})
                reference.add_param_group({"params": list(expected[4].parameters()), "lr": 0.2})
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss_of(model, part(x, rank), part(y, rank)).backward()
            optimizer.step()
            reference.zero_grad(set_to_none=step % 2 == 0)
            loss_of(expected, x, y).backward()
            reference.step()
            for scheduler in (early, late, *schedulers):
                scheduler.step()
        assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in reference.param_groups]
        assert_close(model, expected)

    @pytest.mark.parametrize("way", ["passes", "no_sync"])
    def test_accumulation(self, rank: int, size: int, way: str) -> None:
        model, expected = make_model(), make_model()
        passes = 3
        optimizer = wrap(MAKERS["SGD"](model.parameters()), backward_passes_per_step=passes if way == "passes" else 1)
        reference = MAKERS["SGD"](expected.parameters())
        data = list(batches(4 * passes, size))
        for step in range(4):
            optimizer.zero_grad()
            reference.zero_grad()
            for i, (x, y) in enumerate(data[step * passes : (step + 1) * passes]):
                loss = loss_of(model, part(x, rank), part(y, rank))
                if way == "no_sync" and i < passes - 1:
                    with optimizer.no_sync():
                        loss.backward()
                else:
                    loss.backward()
                loss_of(expected, x, y).backward()
            optimizer.step()
            reference.step()
        assert_close(model, expected)

    def test_gradient_clipping(self, rank: int, size: int) -> None:
        model, expected = make_model(), make_model()
        optimizer, reference = wrap(MAKERS["SGD"](model.parameters())), MAKERS["SGD"](expected.parameters())
        for step, (x, y) in enumerate(batches(6, size)):
            optimizer.zero_grad()
            loss_of(model, part(x, rank), part(y, rank)).backward()
            optimizer.synchronize()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            if step % 2:
                optimizer.step()
            else:
                with optimizer.skip_synchronize():
                    optimizer.step()
            reference.zero_grad()
            loss_of(expected, x, y).backward()
            torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(expected.parameters(), 0.05))
            reference.step()
        assert_close(model, expected)

    def test_closure(self, rank: int, size: int) -> None:
        model, expected = make_model(), make_model()
        optimizer = wrap(torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe"))
        reference = torch.optim.LBFGS(expected.parameters(), max_iter=5, line_search_fn="strong_wolfe")
        for x, y in batches(3, size):

            def mine(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, part(x, rank), part(y, rank))
                loss.backward()
                return loss

            def whole(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                reference.zero_grad()
                loss = loss_of(expected, x, y)
                loss.backward()
                return loss

            torch.testing.assert_close(optimizer.step(mine), reference.step(whole).detach())
        assert_close(model, expected, 1e-7)  # a line search magnifies rounding
        assert_same_everywhere(model)

    def test_mixed_types_and_memory_formats(self, rank: int, size: int) -> None:
        def make() -> nn.Sequential:
            torch.manual_seed(3)
            convolution = nn.Conv2d(2, 3, 3).to(torch.float64, memory_format=torch.channels_last)
            return nn.Sequential(convolution, nn.Flatten(), nn.Linear(12, 2))

        def loss_of(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
            return model[2](model[1](model[0](x)).float()).pow(2).mean()

        model, expected = make(), make()
        optimizer, reference = wrap(MAKERS["SGD"](model.parameters())), MAKERS["SGD"](expected.parameters())
        images = torch.rand(BATCH * size, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        images = images.to(memory_format=torch.channels_last)
        for _ in range(5):
            optimizer.zero_grad()
            loss_of(model, part(images, rank)).backward()
            optimizer.step()
            reference.zero_grad()
            loss_of(expected, images).backward()
            reference.step()
        assert not model[0].weight.grad.is_contiguous()
        assert_close(model, expected, 1e-4)

    def test_compiled_model(self, rank: int, size: int) -> None:
        model, expected = make_model(), make_model()
        compiled = torch.compile(model, backend="aot_eager")
        optimizer, reference = wrap(MAKERS["SGD"](model.parameters())), MAKERS["SGD"](expected.parameters())
        for x, y in batches(4, size):
            optimizer.zero_grad()
            loss_of(compiled, part(x, rank), part(y, rank)).backward()
            optimizer.step()
            reference.zero_grad()
            loss_of(expected, x, y).backward()
            reference.step()
        assert_close(model, expected)


class TestParametersThatComeAndGo:
    def test_unused_on_all_ranks(self, rank: int, size: int) -> None:
        model = make_model()
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5))
        before = copy.deepcopy(model[2])
        for x, _ in batches(3, size):
            optimizer.zero_grad()
            model[0](part(x, rank)).sum().backward()
            optimizer.step()
        assert model[2].weight.grad is None
        assert_close(model[2], before, 0)  # not even decayed
        assert_same_everywhere(model)

    def test_used_on_some_ranks(self, rank: int, size: int) -> None:
        model = make_model()
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=1.0))
        for used_by in [0, size - 1, 0]:
            before = copy.deepcopy(model[2].bias.detach())
            optimizer.zero_grad()
            out = model[0](torch.ones(1, 5, dtype=torch.float64))
            (model[2](out) if rank == used_by else out).sum().backward()
            optimizer.step()
            torch.testing.assert_close(model[2].bias.grad, torch.full((4,), 1 / size, dtype=torch.float64))
            torch.testing.assert_close(model[2].bias.detach(), before - 1 / size)
            assert model[4].bias.grad is None
        assert_same_everywhere(model)

    def test_a_rank_without_any_gradient(self, rank: int, size: int) -> None:
        model = make_model()
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=1.0))
        before = model[4].bias.detach().clone()
        if rank == 0:
            model(torch.ones(1, 5, dtype=torch.float64)).sum().backward()
        optimizer.step()
        torch.testing.assert_close(model[4].bias.detach(), before - 1 / size)
        assert_same_everywhere(model)

    def test_gradients_set_by_hand(self, rank: int, size: int) -> None:
        parameter = nn.Parameter(torch.zeros(3))
        optimizer = wrap(torch.optim.SGD([parameter], lr=1.0))
        for step in range(1, 4):
            parameter.grad = torch.full((3,), float(rank))
            optimizer.step()
            torch.testing.assert_close(parameter.detach(), torch.full((3,), -step * (size - 1) / 2))

    def test_frozen_then_thawed(self, rank: int, size: int) -> None:
        model, expected = make_model(), make_model()
        optimizer, reference = wrap(MAKERS["SGD"](model.parameters())), MAKERS["SGD"](expected.parameters())
        for step, (x, y) in enumerate(batches(9, size)):
            for each in (model, expected):
                each[2].requires_grad_(not 3 <= step < 6)
            optimizer.zero_grad()
            loss_of(model, part(x, rank), part(y, rank)).backward()
            optimizer.step()
            reference.zero_grad()
            loss_of(expected, x, y).backward()
            reference.step()
        assert_close(model, expected)

    def test_thawed_without_zero_grad(self, rank: int, size: int) -> None:
        # No call of the optimizer between the thaw and backward: the round's plan does not know the parameter yet.
        model = make_model()
        model[2].requires_grad_(False)
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=1.0))
        model[2].requires_grad_(True)
        before = model[2].bias.detach().clone()
        (model[2](torch.ones(1, 8, dtype=torch.float64)) * rank).sum().backward()
        optimizer.step()
        torch.testing.assert_close(model[2].bias.detach(), before - (size - 1) / 2)

    def test_ranks_whose_backward_finishes_in_another_order(self, rank: int, size: int) -> None:
        start = {"a": 0.5, "b": 2.0}
        a, b = (nn.Parameter(torch.full((4,), value, dtype=torch.float64)) for value in start.values())
        optimizer = wrap(torch.optim.SGD([a, b], lr=0.1))
        # x = (x0 * first + first * r) * second + second * r, with gradients through the added terms only.
        weights = dict(start)
        for _ in range(5):
            optimizer.zero_grad()
            x = torch.ones(4, dtype=torch.float64)
            for parameter in (a, b) if rank % 2 else (b, a):
                x = x * parameter.detach() + parameter * rank
            x.sum().backward()
            optimizer.step()
            mean = {"a": 0.0, "b": 0.0}
            for r in range(size):
                first, second = "ab" if r % 2 else "ba"
                mean[first] += r * weights[second] / size
                mean[second] += r / size
            for name, parameter in (("a", a), ("b", b)):
                torch.testing.assert_close(parameter.grad, torch.full((4,), mean[name], dtype=torch.float64))
                weights[name] -= 0.1 * mean[name]
        assert dl_comm.check_buffers_match([a.detach().numpy(), b.detach().numpy()], 1) == 0

    def test_sparse_gradients(self, rank: int, size: int) -> None:
        def make() -> nn.Embedding:
            torch.manual_seed(1)
            return nn.Embedding(10, 3, sparse=True)

        words = torch.arange(BATCH * size) % 10
        model, expected = make(), make()
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=1.0), sparse_as_dense=True)
        reference = torch.optim.SGD(expected.parameters(), lr=1.0)
        model(part(words, rank)).pow(2).mean().backward()
        optimizer.step()
        expected(words).pow(2).mean().backward()
        reference.step()
        assert_close(model, expected, 1e-5)

        strict = make()
        optimizer = wrap(torch.optim.SGD(strict.parameters(), lr=1.0))
        with pytest.raises(ValueError, match="weight is sparse"):
            strict(words).sum().backward()


class TestOverlap:
    def test_first_bucket_starts_before_backward_ends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = make_model()
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters())
        events: list[str] = []
        start, wait = _ops.average_start, _ops.wait

        def recorded_start(tensors: Any, team: int, name: str, labels: str, *rest: Any) -> int:
            events.append(f"start {labels.splitlines()[0]}")
            return start(tensors, team, name, labels, *rest)

        def recorded_wait(call: int) -> Any:
            events.append("wait")
            return wait(call)

        monkeypatch.setattr(_ops, "average_start", recorded_start)
        monkeypatch.setattr(_ops, "wait", recorded_wait)
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda _, name=name: events.append(f"gradient {name}"))
        model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
        starts = [event.removeprefix("start ") for event in events if event.startswith("start")]
        assert events[-len(starts) :] == ["wait"] * len(starts)
        assert events[-len(starts) - 1].startswith("start 0.")
        assert events.index("start 4.bias") < events.index("gradient 0.weight")
        assert events.index("start 2.weight") < events.index("gradient 0.weight")
        assert starts == [name for name, _ in model.named_parameters()][::-1]
        done = len(events)
        optimizer.step()
        assert len(events) == done

    def test_step_averages_once(self, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        class Twice(torch.optim.SGD):  # torch calls the hooks of both steps
            def step(self, closure: Any = None) -> Any:
                return super().step(closure)

        torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)  # now SGD.step calls hooks
        model = make_model()
        optimizer = wrap(Twice(model.parameters(), lr=0.1), bucket_mb=25)
        calls: list[int] = []
        start = _ops.average_start
        monkeypatch.setattr(_ops, "average_start", lambda *arguments: calls.append(1) or start(*arguments))
        for x, y in batches(3, size):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
        assert len(calls) == 3


class TestTheOptimizerStaysItself:
    def test_class_state_and_identity(self) -> None:
        model = make_model()
        plain = torch.optim.Adam(model.parameters(), lr=0.3)
        optimizer = wrap(plain)
        assert optimizer is plain
        assert isinstance(optimizer, torch.optim.Adam)
        assert type(optimizer).__name__ == "Adam"
        assert repr(optimizer).startswith("Adam (")

    def test_state_dict_goes_both_ways(self, size: int) -> None:
        model, other = make_model(), make_model()
        optimizer = wrap(MAKERS["Adam"](model.parameters()))
        for x, y in batches(2, size):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
        plain = MAKERS["Adam"](other.parameters())
        plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        other.load_state_dict(model.state_dict())
        optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
        for x, y in batches(2, size):
            for each, its in ((model, optimizer), (other, plain)):
                its.zero_grad()
                loss_of(each, x, y).backward()
                its.step()
        assert_close(model, other)

    def test_copies_and_pickles_are_plain(self) -> None:
        optimizer = wrap(MAKERS["SGD"](make_model().parameters()))
        for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert type(twin) is torch.optim.SGD
            assert twin.param_groups[0]["momentum"] == 0.9

    def test_a_dropped_model_goes_at_once(self) -> None:
        model = make_model()
        optimizer = wrap(MAKERS["SGD"](model.parameters()))
        loss_of(model, torch.ones(1, 5, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)).backward()
        optimizer.step()
        weights = [weakref.ref(parameter) for parameter in model.parameters()]
        gc.collect()
        gc.disable()
        try:
            del model, optimizer
            assert [weight() for weight in weights] == [None] * len(weights)
        finally:
            gc.enable()

    def test_a_model_outlives_its_optimizer(self) -> None:
        model = make_model()
        optimizer = wrap(MAKERS["SGD"](model.parameters()))
        del optimizer
        x = torch.ones(1, 5, dtype=torch.float64)
        model(x).sum().backward()
        model(x).sum().backward()  # nobody averages any more

    def test_parameters_of_rank_0_at_the_beginning(self, rank: int) -> None:
        model, expected = make_model(seed=rank), make_model(seed=0)
        wrap(MAKERS["SGD"](model.parameters()))
        assert_close(model, expected, 0)

    def test_parameters_of_rank_0_in_a_group_that_is_added(self, rank: int) -> None:
        for broadcast in (True, False):
            model, expected = make_model(seed=rank), make_model(seed=0 if broadcast else rank)
            optimizer = wrap(MAKERS["SGD"](model[0].parameters()), broadcast=broadcast)
            optimizer.add_param_group({"params": list(model[2].parameters())})
            optimizer.add_param_group({"params": list(model[4].parameters())})
            assert_close(model, expected, 0)

    def test_a_group_that_differs_between_ranks_is_not_added(self, rank: int, size: int) -> None:
        if size == 1:
            pytest.skip("needs two ranks")
        optimizer = wrap(MAKERS["SGD"](make_model()[0].parameters()))
        with pytest.raises(dl_comm.MismatchError):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2 + rank))]})
        assert len(optimizer.param_groups) == 1

    def test_parameters_left_alone_on_request(self, rank: int) -> None:
        model, expected = make_model(seed=rank), make_model(seed=rank)
        wrap(MAKERS["SGD"](model.parameters()), broadcast=False)
        assert_close(model, expected, 0)


class TestSeveralOptimizers:
    def test_each_takes_a_team_of_its_own(self, rank: int, size: int) -> None:
        models = [make_model(seed=1), make_model(seed=2)]
        expected = [make_model(seed=1), make_model(seed=2)]
        optimizers = [cdl.DistributedOptimizer(MAKERS["SGD"](m.parameters()), bucket_mb=TINY) for m in models]
        references = [MAKERS["SGD"](m.parameters()) for m in expected]
        for x, y in batches(5, size):
            # One backward for both, as in adversarial training.
            for optimizer in optimizers:
                optimizer.zero_grad()
            sum(loss_of(m, part(x, rank), part(y, rank)) for m in models).backward()
            for optimizer in optimizers[:: 1 if rank % 2 else -1]:  # teams are independent: any order will do
                optimizer.step()
            for reference in references:
                reference.zero_grad()
            sum(loss_of(m, x, y) for m in expected).backward()
            for reference in references:
                reference.step()
        for model, twin in zip(models, expected, strict=True):
            assert_close(model, twin)


class TestMisuse:
    def test_gradients_thrown_away(self, rank: int, size: int) -> None:
        model, expected = make_model(), make_model()
        optimizer, reference = wrap(MAKERS["SGD"](model.parameters())), MAKERS["SGD"](expected.parameters())
        for step, (x, y) in enumerate(batches(6, size)):
            optimizer.zero_grad()
            loss_of(model, part(x, rank), part(y, rank)).backward()
            if step % 2:
                continue
            optimizer.step()
            reference.zero_grad()
            loss_of(expected, x, y).backward()
            reference.step()
        optimizer.zero_grad()
        assert_close(model, expected)

    def test_wrong_arguments(self) -> None:
        model = make_model()
        with pytest.raises(TypeError, match="expected a torch optimizer, not Sequential"):
            cdl.DistributedOptimizer(model)
        for count in ("nteam", "nthread_per_team", "threads", "bucket_mb", "backward_passes_per_step"):
            with pytest.raises(ValueError, match="invalid"):
                cdl.DistributedOptimizer(MAKERS["SGD"](model.parameters()), **{count: 0})
        optimizer = wrap(MAKERS["SGD"](model.parameters()))
        with pytest.raises(ValueError, match="already"):
            wrap(optimizer)

    def test_sparse_adam_is_refused(self, rank: int, size: int) -> None:
        model = nn.Embedding(10, 3, sparse=True)
        with pytest.raises(dl_comm.ArgumentError, match=r"SparseAdam .* use torch.optim.Adam"):
            wrap(torch.optim.SparseAdam(model.parameters()))
        optimizer = wrap(torch.optim.Adam(model.parameters()), sparse_as_dense=True)
        model(torch.tensor([rank])).sum().backward()
        optimizer.step()
        assert_same_everywhere(model)

    def test_models_that_differ_between_ranks(self, rank: int, size: int) -> None:
        if size == 1:
            pytest.skip("needs two ranks")
        model = nn.Linear(3 if rank == 0 else 4, 2)
        with pytest.raises(dl_comm.MismatchError):
            wrap(torch.optim.SGD(model.parameters(), lr=0.1))
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), broadcast=False, bucket_mb=25)
        with pytest.raises(dl_comm.MismatchError):
            model(torch.ones(1, model.in_features)).sum().backward()
        good = nn.Linear(3, 2)
        optimizer = wrap(torch.optim.SGD(good.parameters(), lr=0.1))
        good(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        assert_same_everywhere(good)
