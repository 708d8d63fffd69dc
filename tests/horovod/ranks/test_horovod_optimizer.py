"""`DistributedOptimizer`, and the broadcast of parameters and state."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch

import horovod.torch as hvd


def make(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def train_alone(size: int, steps: int, scale: float = 1.0, clip: float | None = None) -> torch.nn.Module:
    """One process with the batches of all ranks."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        loss = sum(model(batch(rank, step)).square().mean() for rank in range(size)) / size * scale
        loss.backward()  # type: ignore[union-attr]
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def equal(one: torch.nn.Module, other: torch.nn.Module, atol: float = 1e-5) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(x, y, atol=atol) for x, y in pairs)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"op": hvd.Sum},
    {"compression": hvd.Compression.fp16},
    {"compression": hvd.Compression.bf16},
    {"gradient_predivide_factor": 2.0},
    {"groups": 2},
    {"groups": 2, "gradient_predivide_factor": 2.0, "compression": hvd.Compression.fp16},
    {"groups": "lists"},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_training_is_that_of_one_process(rank: int, size: int, options: dict[str, Any]) -> None:
    model = make()
    if options.get("groups") == "lists":
        options = {"groups": [list(model[0].parameters()), [model[2].weight]]}
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters(), **options)
    assert optimizer is inner
    assert isinstance(optimizer, torch.optim.SGD)
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
    scale = size if options.get("op") == hvd.Sum else 1
    alone = train_alone(size, 4, scale)
    assert equal(model, alone, 2e-2 if "compression" in options else 1e-5)


@pytest.mark.parametrize("threshold", [0, 40, 200])
def test_the_fusion_threshold(rank: int, size: int, threshold: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from horovod.torch._reducer import _fused

    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", str(threshold))
    parameters = list(make().parameters())  # of 128, 32, 32 and 4 bytes
    assert [len(group) for group in _fused(parameters)] == {0: [1, 1, 1, 1], 40: [1, 1, 2], 200: [4]}[threshold]
    model = make()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step in range(3):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
    assert equal(model, train_alone(size, 3))


def test_a_second_pass_of_a_part_is_reduced_too(rank: int, size: int) -> None:
    model = make()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    reference = make()
    for step in range(2):
        optimizer.zero_grad()
        reference.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        model[0](batch(rank, 7)).square().mean().backward()
        optimizer.step()
        for other in range(size):
            (reference(batch(other, step)).square().mean() / size).backward()
            (reference[0](batch(other, 7)).square().mean() / size).backward()
        torch.optim.SGD(reference.parameters(), lr=0.1).step()
    assert equal(model, reference)


def test_a_backward_pass_that_fails_changes_nothing(rank: int, size: int) -> None:
    model = make()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise KeyError("broken")

    with pytest.raises(KeyError):
        model[2](Fails.apply(model[:2](batch(rank, 0)))).square().mean().backward()
    for step in range(2):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    assert equal(model, train_alone(size, 2, clip=0.05))


@pytest.mark.parametrize("ritual", [False, True])
def test_clipping(rank: int, size: int, ritual: bool) -> None:
    model = make()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step in range(3):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        if ritual:
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
    assert equal(model, train_alone(size, 3, clip=0.05))


def test_grad_scaler_skips_on_all_ranks(rank: int, size: int) -> None:
    model = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    before = copy.deepcopy(model)
    for step in range(2):
        optimizer.zero_grad()
        loss = model(batch(rank, 0)).square().mean()
        scaler.scale(loss * (float("inf") if step == 0 and rank == 0 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == 0:
            assert equal(model, before)
    assert not equal(model, before, 0.0)
    assert scaler.get_scale() == 2.0
    assert len({tuple(each) for each in hvd.allgather_object(model[2].bias.tolist())}) == 1


def test_several_passes_and_a_schedule(rank: int, size: int) -> None:
    model = make()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)  # made before
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), backward_passes_per_step=2)
    reference = make()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step, passes in enumerate((2, 2, 3)):
        optimizer.set_backward_passes_per_step(passes)
        optimizer.zero_grad()
        plain.zero_grad()
        for i in range(passes):
            model(batch(rank, 10 * step + i)).square().mean().backward()
            for other in range(size):
                (reference(batch(other, 10 * step + i)).square().mean() / size).backward()
        optimizer.step()
        plain.step()
        schedule.step()
        plain.param_groups[0]["lr"] *= 0.5
    assert equal(model, reference)


def test_ranks_may_use_different_parts(rank: int, size: int) -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(4, 1) for _ in range(3)])
    hvd.broadcast_parameters(model.state_dict(), 0)
    start = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    for _ in range(3):  # the second pass knows what the first has used
        optimizer.zero_grad()
        model[rank % 2](torch.ones(1, 4)).sum().backward()
        optimizer.step()
    users = [sum(1 for other in range(size) if other % 2 == part) for part in range(3)]
    for part, (mine, before) in enumerate(zip(model, start, strict=True)):
        assert torch.allclose(mine.bias, before.bias - 3 * users[part] / size, atol=1e-5)


def test_a_rank_without_a_backward_pass(rank: int, size: int) -> None:
    model = make()
    before = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    if rank != size - 1 or size == 1:
        model(batch(rank, 0)).square().mean().backward()
    optimizer.step()
    for other in range(max(size - 1, 1)):
        (before(batch(other, 0)).square().mean() / size).backward()
    torch.optim.SGD(before.parameters(), lr=0.1).step()
    assert equal(model, before)


def test_passes_after_a_step_without_any(rank: int, size: int) -> None:
    model = make()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), backward_passes_per_step=2)
    reference = make()
    optimizer.step()  # zeros: this rank, as all, has no gradient
    optimizer.zero_grad()
    for step in range(2):
        model(batch(rank, step)).square().mean().backward()
        for other in range(size):
            (reference(batch(other, step)).square().mean() / size).backward()
    optimizer.step()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    assert equal(model, reference)


def test_two_passes_average_or_are_refused(rank: int, size: int) -> None:
    for op in (hvd.Average, hvd.Sum):
        model = make()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=op)
        model(batch(rank, 0)).square().mean().backward()
        if op == hvd.Sum:
            with pytest.raises(AssertionError, match="backward_passes_per_step"):
                model(batch(rank, 1)).square().mean().backward()
            continue
        model(batch(rank, 1)).square().mean().backward()
        optimizer.step()
        reference = make()
        for other, step in itertools.product(range(size), range(2)):
            (reference(batch(other, step)).square().mean() / size).backward()
        torch.optim.SGD(reference.parameters(), lr=0.1).step()
        assert equal(model, reference)


def test_parameters_may_be_frozen_and_unfrozen(rank: int, size: int) -> None:
    model = make()
    model[0].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for step in range(3):
        model[0].requires_grad_(step > 0)
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
    found = hvd.allgather_object(model[0].weight.tolist())
    assert all(each == found[0] for each in found)
    assert not torch.equal(model[0].weight, make()[0].weight)


@pytest.mark.parametrize("groups", [None, 1])
@pytest.mark.parametrize("as_dense", [True, False])
def test_sparse_gradients(rank: int, size: int, as_dense: bool, groups: int | None) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(6, 3, sparse=True), torch.nn.Linear(3, 1))
    reference = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5), sparse_as_dense=as_dense, groups=groups
    )
    plain = torch.optim.SGD(reference.parameters(), lr=0.5)
    for step in range(2):
        optimizer.zero_grad()
        plain.zero_grad()
        model(torch.tensor([rank % 6, 5, step])).sum().backward()
        assert model[0].weight.grad.is_sparse
        for other in range(size):
            (reference(torch.tensor([other % 6, 5, step])).sum() / size).backward()
        optimizer.step()
        plain.step()
    assert equal(model, reference)


def test_lbfgs_takes_the_same_steps_everywhere(rank: int, size: int) -> None:
    model = make()
    optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe"))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch(rank, 0)).square().mean()
        loss.backward()
        return loss

    first = float(closure().detach())
    for _ in range(2):
        optimizer.step(closure)
    assert float(closure().detach()) < first
    found = hvd.allgather_object([each.tolist() for each in model.parameters()])
    assert all(each == found[0] for each in found)
    hvd.broadcast_optimizer_state(optimizer, 0)


def test_adasum_reduces_the_changes(rank: int, size: int) -> None:
    model = make()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Adasum)
    before = copy.deepcopy(model)
    optimizer.zero_grad()
    model(batch(0, 0)).square().mean().backward()  # the same on all ranks: Adasum keeps it
    optimizer.step()
    before(batch(0, 0)).square().mean().backward()
    torch.optim.SGD(before.parameters(), lr=0.1).step()
    assert equal(model, before)


def test_process_set_optimizer(rank: int, size: int) -> None:
    if size < 2:
        pytest.skip("needs several ranks")
    first = hvd.add_process_set([0])
    model = make(rank)
    reference = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), process_set=first)
    model(batch(rank, 0)).square().mean().backward()
    optimizer.step()
    reference(batch(rank, 0)).square().mean().backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    assert equal(model, reference)
    hvd.remove_process_set(first)


@pytest.mark.parametrize(
    "arguments",
    [
        {"named_parameters": [("weight", torch.nn.Parameter(torch.ones(1)))]},
        {"named_parameters": torch.nn.Linear(1, 1).parameters()},
        {"backward_passes_per_step": 0},
        {"op": hvd.Sum, "gradient_predivide_factor": 2.0},
        {"op": hvd.Max},
        {"groups": -1},
        {"groups": [[1]]},
    ],
)
def test_wrong_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        hvd.DistributedOptimizer(torch.optim.SGD(make().parameters(), lr=0.1), **arguments)


def test_names_must_be_unique() -> None:
    one, two = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
    with pytest.raises(ValueError, match="weight, bias"):
        hvd.DistributedOptimizer(optimizer, itertools.chain(one.named_parameters(), two.named_parameters()))


@pytest.mark.parametrize("kind", ["Adam", "SGD", "Muon", "Adagrad", "RMSprop"])
def test_state_is_broadcast_without_a_step(rank: int, size: int, kind: str) -> None:
    torch.manual_seed(rank)
    model = torch.nn.Linear(4, 4, bias=False)
    optimizer = hvd.DistributedOptimizer(getattr(torch.optim, kind)(model.parameters(), lr=0.1 * (rank + 1)))
    if rank == 0:
        with optimizer.skip_synchronize():
            model(torch.ones(1, 4)).sum()
            model.weight.grad = torch.ones(4, 4)
            optimizer.step()
    hvd.broadcast_parameters(model.named_parameters(), 0)
    before = model.weight.detach().clone()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert torch.equal(model.weight, before)
    assert optimizer.param_groups[0]["lr"] == 0.1
    states = hvd.allgather_object({key: str(value) for key, value in optimizer.state[model.weight].items()})
    assert all(each == states[0] for each in states)


def test_lists_and_dictionaries_of_parameters(rank: int, size: int) -> None:
    for params in ({"a": torch.full((2,), rank), "b": torch.tensor(float(rank))}, [torch.full((2,), rank)]):
        hvd.broadcast_parameters(params, size - 1)
        tensors = params.values() if isinstance(params, dict) else params
        assert all(bool((tensor == size - 1).all()) for tensor in tensors)
    with pytest.raises(ValueError, match="int"):
        hvd.broadcast_parameters(3, 0)  # type: ignore[arg-type]
