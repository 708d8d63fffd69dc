"""Gradients in memory that the ranks share, order and size of buckets, and what an optimizer tells of its averages."""

from __future__ import annotations

import copy
import gc
import io
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import dl_comm as mc  # noqa: E402
import dl_comm.torch as cdl  # noqa: E402
from dl_comm.torch import _bucket_plan, _ops, _optimizer, _shared_grads  # noqa: E402

pytestmark = pytest.mark.costly

BATCH = 4  # of one rank
TINY = 1e-9  # a bucket for each parameter


class Model(nn.Module):
    """Layers of many shapes: tiny ones, one that is used twice, a scalar, one that not every step uses."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Linear(5, 3, dtype=dtype)
        self.twice = nn.Linear(3, 3, dtype=dtype)
        self.rare = nn.Linear(3, 3, dtype=dtype)
        self.long = nn.Linear(3, 9_001, dtype=dtype)
        self.last = nn.Linear(9_001, 1, bias=False, dtype=dtype)
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, x: torch.Tensor, rare: bool) -> torch.Tensor:
        """Return a number for each row of `x`."""
        x = torch.tanh(self.twice(torch.tanh(self.twice(self.first(x)))))
        x = self.rare(x) if rare else x
        return self.last(torch.tanh(self.long(x)) / 100) * self.scale


def losses(model: Model, size: int, step: int, rare: Callable[[int, int], bool]) -> list[torch.Tensor]:
    """Return the losses of all ranks in a step."""
    x = torch.rand(size, BATCH, 5, generator=torch.Generator().manual_seed(step), dtype=model.scale.dtype)
    return [model(x[r], rare(step, r)).square().mean() for r in range(size)]


def always(step: int, rank: int) -> bool:
    return True


def sometimes(step: int, rank: int) -> bool:
    return (step + rank) % 3 == 0


# What a script may do in a step, as a function of the model, its optimizer and this rank's loss; `plain`: no averages.


def usual(model: Model, optimizer: Any, loss: torch.Tensor, step: int, plain: bool) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def zeros(model: Model, optimizer: Any, loss: torch.Tensor, step: int, plain: bool) -> None:
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    optimizer.step()


def by_turns(model: Model, optimizer: Any, loss: torch.Tensor, step: int, plain: bool) -> None:
    model.zero_grad(set_to_none=step % 3 > 0)  # of the model, not of the optimizer
    optimizer.zero_grad(set_to_none=step % 2 > 0)
    loss.backward()
    optimizer.step()


def clipped(model: Model, optimizer: Any, loss: torch.Tensor, step: int, plain: bool) -> None:
    optimizer.zero_grad()
    loss.backward()
    if not plain:
        optimizer.synchronize()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=step % 2 > 0)
    optimizer.step()


def accumulated(model: Model, optimizer: Any, loss: torch.Tensor, step: int, plain: bool) -> None:
    optimizer.zero_grad()
    if plain:
        loss.backward(retain_graph=True)
    else:
        with optimizer.no_sync():
            loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()


def replaced(model: Model, optimizer: Any, loss: torch.Tensor, step: int, plain: bool) -> None:
    """The script puts other gradients in place of the optimizer's, before backward and after the averages."""
    for i, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 1e-3) if i % 2 else None
    loss.backward()
    if not plain:
        optimizer.synchronize()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 2
    optimizer.step()


def by_hand(model: Model, optimizer: Any, loss: torch.Tensor, step: int, plain: bool) -> None:
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


def transposed(model: Model, optimizer: Any, loss: torch.Tensor, step: int, plain: bool) -> None:
    """Gradients that are not contiguous, and one that has a graph."""
    optimizer.zero_grad()
    model.twice.weight.grad = torch.zeros_like(model.twice.weight).t()
    loss.backward(create_graph=True)
    optimizer.step()
    for parameter in model.parameters():
        parameter.grad = None  # the graph of a gradient keeps the parameter


def scaled(model: Model, optimizer: Any, loss: torch.Tensor, step: int, plain: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_value_(model.parameters(), 0.05)
    scaler.step(optimizer)
    scaler.update()


def frozen(model: Model, optimizer: Any, loss: torch.Tensor, step: int, plain: bool) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.twice.requires_grad_(step % 3 > 0)  # for the next step


def kept(model: Model, optimizer: Any, loss: torch.Tensor, step: int, plain: bool) -> None:
    """The script holds on to gradients and to parts of them."""
    optimizer.zero_grad(set_to_none=step % 2 > 0)
    loss.backward()
    held, part = model.long.weight.grad, model.first.weight.grad[1]
    optimizer.step()
    assert held is model.long.weight.grad
    assert part.shape == (5,)


def converted(model: Model, optimizer: Any, loss: torch.Tensor, step: int, plain: bool) -> None:
    """A module that is converted gets gradients in other memory, in the same tensors."""
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    optimizer.step()
    if step == 1:
        model.float().to(model.first.weight.dtype).double().float()


WAYS = (usual, zeros, by_turns, clipped, accumulated, replaced, by_hand, scaled, frozen, kept)


def train(
    way: Callable[..., None],
    model: Model,
    optimizer: Any,
    size: int,
    rank: int | None,
    rare: Callable[[int, int], bool],
) -> Model:
    """Train on this rank's share, or, with `rank` None, on all ranks' batches in one process."""
    for step in range(6):
        each = losses(model, size, step, rare)
        way(model, optimizer, sum(each) / size if rank is None else each[rank], step, rank is None)
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-2)


def bits(model: nn.Module) -> list[bytes]:
    """Return the parameters' bits."""
    return [parameter.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for parameter in model.parameters()]


class TestParity:
    """Shared memory changes no bit, and N ranks reach the weights of one process on the joined batch."""

    @pytest.mark.parametrize("bucket_mb", [TINY, 0.02, None])
    @pytest.mark.parametrize("rare", [always, sometimes])
    @pytest.mark.parametrize("way", WAYS)
    def test_every_way(
        self, way: Callable[..., None], rare: Callable[[int, int], bool], bucket_mb: float | None, rank: int, size: int
    ) -> None:
        models = []
        for as_views in (True, False):
            model = Model(torch.float64)
            optimizer = cdl.DistributedOptimizer(
                sgd(model), team=0, bucket_mb=bucket_mb, gradient_as_bucket_view=as_views
            )
            models.append(train(way, model, optimizer, size, rank, rare))
        assert bits(models[0]) == bits(models[1])
        alone = Model(torch.float64)
        train(way, alone, sgd(alone), size, None, rare)
        for a, b in zip(models[0].parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)

    def test_the_size_of_the_buckets_changes_no_bit(self, rank: int, size: int) -> None:
        models = []
        for bucket_mb in (TINY, 0.02, 25, None):
            model = Model(torch.float32)
            optimizer = cdl.DistributedOptimizer(sgd(model), team=0, bucket_mb=bucket_mb)
            models.append(train(usual, model, optimizer, size, rank, sometimes))
        assert all(bits(model) == bits(models[0]) for model in models)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("way", [usual, zeros])
    def test_other_types(self, way: Callable[..., None], dtype: torch.dtype, rank: int, size: int) -> None:
        models = []
        for as_views in (True, False):
            model = Model(dtype)
            optimizer = cdl.DistributedOptimizer(sgd(model), team=0, gradient_as_bucket_view=as_views)
            models.append(train(way, model, optimizer, size, rank, sometimes))
        assert bits(models[0]) == bits(models[1])
        assert mc.check_buffers_match(list(models[0].parameters()), 1) == 0

    @pytest.mark.filterwarnings("ignore:grad and param do not obey")
    @pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
    @pytest.mark.parametrize("way", [transposed, converted])
    def test_gradients_that_cannot_lie_there(self, way: Callable[..., None], rank: int, size: int) -> None:
        models = []
        for as_views in (True, False):
            model = Model(torch.float32)
            optimizer = cdl.DistributedOptimizer(sgd(model), team=0, gradient_as_bucket_view=as_views)
            models.append(train(way, model, optimizer, size, rank, always))
        assert bits(models[0]) == bits(models[1])

    @pytest.mark.parametrize("set_to_none", [True, False])
    @pytest.mark.parametrize("trans_alg", [0, 1])
    def test_on_a_schedule(self, trans_alg: int, set_to_none: bool, rank: int, size: int) -> None:
        steps, models = 12, []
        for as_views in (True, False):
            model = Model(torch.float64)
            mc.config_team(21, trans_alg, 3, steps)
            optimizer = cdl.DistributedOptimizer(
                sgd(model), team=21, bucket_mb=0.02, gradient_as_bucket_view=as_views, broadcast=False
            )
            for step in range(steps + 3):
                optimizer.zero_grad(set_to_none=set_to_none)
                losses(model, size, step, sometimes)[rank].backward()
                optimizer.step()
            models.append(model)
        assert bits(models[0]) == bits(models[1])

    def test_a_group_that_is_added(self, rank: int, size: int) -> None:
        models = []
        for as_views in (True, False):
            model = Model(torch.float64)
            early = [p for name, p in model.named_parameters() if "long" not in name]
            optimizer = cdl.DistributedOptimizer(
                torch.optim.SGD(early, lr=0.1), team=0, bucket_mb=0.01, gradient_as_bucket_view=as_views
            )
            for step in range(6):
                if step == 2:
                    optimizer.add_param_group({"params": list(model.long.parameters())})
                usual(model, optimizer, losses(model, size, step, always)[rank], step, False)
            models.append(model)
        assert bits(models[0]) == bits(models[1])


def backward(size: int, rank: int, **options: Any) -> tuple[Model, Any]:
    """Return a model after a backward pass, and its optimizer."""
    model = Model(torch.float32)
    named = model.named_parameters()
    optimizer = cdl.DistributedOptimizer(sgd(model), **{"team": 0, "named_parameters": named, **options})
    losses(model, size, 0, always)[rank].backward()
    return model, optimizer


class TestMemory:
    @pytest.mark.parametrize("set_to_none", [True, False])
    def test_references_see_the_mean(self, set_to_none: bool, rank: int, size: int) -> None:
        if size == 1:
            pytest.skip("nobody to share memory with")
        model, optimizer = backward(size, rank)
        for step in range(3):
            whole, part = model.first.weight.grad, model.first.weight.grad[1]
            optimizer.step()
            assert whole is model.first.weight.grad
            assert torch.equal(part, model.first.weight.grad[1])
            optimizer.zero_grad(set_to_none)
            losses(model, size, step, always)[rank].backward()

    @pytest.mark.parametrize("derived", [True, False])
    def test_gradients_of_the_step_before_stay_what_they_were(self, derived: bool, rank: int, size: int) -> None:
        model, optimizer = backward(size, rank)
        for step in range(1, 5):
            optimizer.step()
            kept = [p.grad.view(-1) if derived else p.grad for p in model.parameters() if p.grad is not None]
            values = [gradient.clone() for gradient in kept]
            optimizer.zero_grad()
            losses(model, size, step, sometimes)[rank].backward()
            optimizer.synchronize()
            assert all(map(torch.equal, kept, values))
            assert not torch.equal(kept[0], model.scale.grad.view_as(kept[0]))
            kept.clear()
        assert mc.check_buffers_match(list(model.parameters()), 1) == 0

    def test_one_piece_that_stays(self, rank: int, size: int) -> None:
        if size == 1:
            pytest.skip("nobody to share memory with")
        model, optimizer = backward(size, rank, bucket_mb=25)
        starts = [parameter.grad.data_ptr() for parameter in model.parameters()]
        bounds = sorted((start, start + p.nbytes) for start, p in zip(starts, model.parameters(), strict=True))
        assert all(0 <= b[0] - a[1] < 64 for a, b in zip(bounds, bounds[1:], strict=False))
        assert all(start % 64 == 0 for start, _ in bounds)
        for step in range(1, 4):
            usual(model, optimizer, losses(model, size, step, always)[rank], step, False)
            assert starts == [parameter.grad.data_ptr() for parameter in model.parameters()]

    def test_it_is_memory_that_the_ranks_share(self, rank: int, size: int) -> None:
        if size == 1:
            pytest.skip("nobody to share memory with")
        for as_views in (True, False):
            model, optimizer = backward(size, rank, gradient_as_bucket_view=as_views)
            optimizer.step()
            places = [parameter.grad.data_ptr() for parameter in model.parameters()]
            shared = [line for line in Path("/proc/self/maps").read_text().splitlines() if "dl_comm" in line]
            spans = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in shared]
            inside = [any(start <= at < end for start, end in spans) for at in places]
            assert all(inside) if as_views else not any(inside)

    def test_a_gradient_that_is_saved_or_copied_takes_no_other_along(self, rank: int, size: int) -> None:
        model, optimizer = backward(size, rank)
        optimizer.step()
        file = io.BytesIO()
        torch.save([model.first.bias.grad, optimizer.state_dict()["param_groups"], model.first.state_dict()], file)
        assert file.tell() < 10_000
        file.seek(0)
        assert torch.equal(torch.load(file)[0], model.first.bias.grad)
        twin = copy.deepcopy(model)
        twin.first.bias.grad = copy.deepcopy(model.first.bias.grad)
        twin.first.bias.grad.zero_()
        assert model.first.bias.grad.any()
        assert bits(twin) == bits(model)

    def test_gradients_outlive_the_optimizer_and_the_memory_goes_with_them(self, rank: int, size: int) -> None:
        if size == 1:
            pytest.skip("nobody to share memory with")
        model, optimizer = backward(size, rank)
        optimizer.step()
        memory = weakref.ref(optimizer.__dict__[_optimizer._ATTRIBUTE]._buckets[0]._memory)
        before = model.long.weight.grad.clone()
        del optimizer
        gc.collect()
        assert memory() is None
        assert torch.equal(model.long.weight.grad, before)

    @pytest.mark.parametrize("everywhere", [True, False])
    def test_without_shared_memory(
        self, everywhere: bool, monkeypatch: pytest.MonkeyPatch, rank: int, size: int
    ) -> None:
        def full(*_: Any) -> Any:
            raise mc.CommError("the file system is full")

        whole = Model(torch.float64)
        expected = train(usual, whole, cdl.DistributedOptimizer(sgd(whole), team=0), size, rank, sometimes)
        if everywhere or rank == size - 1:
            monkeypatch.setattr(_shared_grads, "shared_zeros", full)
        model = Model(torch.float64)
        optimizer = cdl.DistributedOptimizer(sgd(model), team=0, bucket_mb=0.02)
        assert bits(train(usual, model, optimizer, size, rank, sometimes)) == bits(expected)

    def test_a_child_that_frees_it_leaves_it_alone(self, rank: int, size: int) -> None:
        model, optimizer = backward(size, rank)
        optimizer.step()
        before = model.long.weight.grad.clone()
        child = os.fork()
        if child == 0:
            del optimizer
            model.zero_grad()
            gc.collect()
            os._exit(0)
        os.waitpid(child, 0)
        assert torch.equal(model.long.weight.grad, before)

    def test_half_of_the_file_system_is_left_to_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _shared_grads.SharedGradBuffer([torch.zeros(10)], 1)
        monkeypatch.setattr(_shared_grads, "_RESERVED_FRACTION", 1.0)
        with pytest.raises(mc.CommError, match="too little free space"):
            _shared_grads.SharedGradBuffer([torch.zeros(10)], 1)

    def test_after_a_call_that_nobody_waited_for(self, rank: int, size: int) -> None:
        model = Model(torch.float32)
        optimizer = cdl.DistributedOptimizer(sgd(model), team=0, bucket_mb=TINY)
        held: list[torch.Tensor] = []

        def again(_: torch.Tensor) -> None:
            # As if backward reached a parameter twice, with its call in flight.
            held.append(model.last.weight.grad)
            optimizer.__dict__[_optimizer._ATTRIBUTE].on_gradient_ready(0, 0)

        hook = model.first.weight.register_hook(again)
        with pytest.raises(mc.StateError, match="during its allreduce"):
            losses(model, size, 0, always)[rank].backward()
        hook.remove()
        optimizer.zero_grad()
        usual(model, optimizer, losses(model, size, 1, always)[rank], 1, False)
        assert model.last.weight.grad.data_ptr() != held[0].data_ptr()
        assert mc.check_buffers_match(list(model.parameters()), 1) == 0

    def test_the_parameter_that_differs_is_named(self, rank: int, size: int) -> None:
        if size == 1:
            pytest.skip("needs two ranks")
        own = {"weight": nn.Parameter(torch.zeros(500)), "small": nn.Parameter(torch.zeros(2 + (rank == 0)))}
        optimizer = cdl.DistributedOptimizer(
            torch.optim.SGD(own.values(), lr=0.1), team=0, named_parameters=own, broadcast=False
        )
        with pytest.raises(mc.MismatchError, match="small"):
            sum(parameter.sum() for parameter in own.values()).backward()
        del optimizer


class Ring(nn.Module):
    """Layers whose backward goes in an order that has nothing to do with that of their registration."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.order = order
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layers in their order."""
        for i in self.order:
            x = torch.tanh(self.layers[i](x))
        return x


class TestBucketPlan:
    def test_the_order_of_rank_0s_first_backward(self, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
        model = Ring([3, 0, 4, 1] if rank == 0 else [0, 1, 2, 3, 4])
        optimizer = cdl.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            team=0,
            bucket_mb=TINY,
            named_parameters=model.named_parameters(),
        )
        started: list[str] = []
        start = _ops.average_start

        def noted(tensors: Any, team: int, name: str, labels: str, *rest: Any) -> int:
            started.append(labels.split(".")[1])
            return start(tensors, team, name, labels, *rest)

        monkeypatch.setattr(_ops, "average_start", noted)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            # Of rank 0: what its backward met last comes first; the layer that it has not used comes last.
            assert "".join(started) == ("43210" if step == 0 else "14032")
            started.clear()
        assert mc.check_buffers_match(list(model.parameters()), 1) == 0

    def test_the_size_that_was_fastest(self, monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
        monkeypatch.setattr(_bucket_plan, "SIZES", (1e-3, 1e-4, TINY))
        # The mean over the ranks decides: on three, the last is faster than what is best for rank 0.
        taken = {1e-3: 9.0, 1e-4: 1.0 + 5 * rank, TINY: 4.0 - rank}
        means = {1e-3: 9.0, 1e-4: 1.0 + 5 * (size - 1) / 2, TINY: 4.0 - (size - 1) / 2}
        record_time = _bucket_plan.BucketPlan.record_time

        def pretend(self: Any, seconds: float) -> None:
            assert seconds >= 0.0
            record_time(self, next(value for mb, value in taken.items() if int(mb * 2**20) == self.bucket_bytes))

        monkeypatch.setattr(_bucket_plan.BucketPlan, "record_time", pretend)
        model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(6)))
        optimizer = cdl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), team=0)
        bucket_plan = optimizer.__dict__[_optimizer._ATTRIBUTE]._bucket_plan
        sizes = []
        for _ in range(1 + 3 * (_bucket_plan.ROUNDS_PER_SIZE + 2) + 2):
            optimizer.zero_grad()
            model(torch.ones(2, 10)).sum().backward()
            optimizer.step()
            sizes.append(bucket_plan.bucket_bytes)
        assert set(sizes) == {int(mb * 2**20) for mb in taken}, "each is tried"
        assert sizes[-1] == sizes[-2] == int(min(means, key=lambda mb: means[mb]) * 2**20)
        assert mc.check_buffers_match(list(model.parameters()), 1) == 0

    def test_a_smaller_size_must_be_clearly_faster(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_bucket_plan, "SIZES", (1e-3, 1e-4, TINY))
        seconds = {1e-3: 1.03, 1e-4: 1.0, TINY: 1.2}
        record_time = _bucket_plan.BucketPlan.record_time

        def pretend(self: Any, _: float) -> None:
            record_time(self, next(value for mb, value in seconds.items() if int(mb * 2**20) == self.bucket_bytes))

        monkeypatch.setattr(_bucket_plan.BucketPlan, "record_time", pretend)
        model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(6)))
        optimizer = cdl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), team=0)
        for _ in range(2 + 3 * (_bucket_plan.ROUNDS_PER_SIZE + 2)):
            optimizer.zero_grad()
            model(torch.ones(2, 10)).sum().backward()
            optimizer.step()
        assert optimizer.__dict__[_optimizer._ATTRIBUTE]._bucket_plan.bucket_bytes == int(1e-3 * 2**20)

    def test_a_size_from_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def wrapped(**options: Any) -> Any:
            model = nn.Linear(2, 2)
            optimizer = cdl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), team=0, **options)
            return optimizer.__dict__[_optimizer._ATTRIBUTE]._bucket_plan.bucket_bytes

        monkeypatch.setenv("DL_COMM_BUCKET_MB", "2.5")
        assert wrapped() == 5 << 19
        assert wrapped(bucket_mb=3) == 3 << 20
        for value in ("many", "0", "-1", "nan", "inf"):
            monkeypatch.setenv("DL_COMM_BUCKET_MB", value)
            with pytest.raises(mc.ArgumentError, match=f"invalid DL_COMM_BUCKET_MB: '{value}'"):
                wrapped()


@pytest.mark.parametrize("as_views", [True, False])
def test_what_an_optimizer_tells_of_its_averages(as_views: bool, rank: int, size: int) -> None:
    model = Model(torch.float32)
    optimizer = cdl.DistributedOptimizer(sgd(model), team=0, gradient_as_bucket_view=as_views)
    assert optimizer.communication() == cdl.Communication(exposed=0.0, total=0.0)
    for step in range(3):
        loss = losses(model, size, step, always)[rank]
        # Autograd is late with the last gradient of rank 0, and the others wait for it at the end of their backward.
        hook = model.first.weight.register_hook(lambda _: time.sleep(0.3 if rank == 0 else 0.0))
        mc.barrier()
        since = time.perf_counter()
        loss.backward()
        elapsed = time.perf_counter() - since
        hook.remove()
        optimizer.step()
        communication = optimizer.communication()
        assert 0.0 < communication.exposed <= elapsed
        assert communication.total > 0.0
        if size > 1:
            assert communication.exposed < elapsed - 0.2 if rank == 0 else communication.exposed <= elapsed
        optimizer.zero_grad()
