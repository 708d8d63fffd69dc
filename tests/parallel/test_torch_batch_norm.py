"""`SyncBatchNorm` on 1, 2, 3 ranks against `BatchNorm` on the joined batch in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dl_comm  # noqa: E402
import dl_comm.torch as cdl  # noqa: E402

KINDS = {1: torch.nn.BatchNorm1d, 2: torch.nn.BatchNorm2d, 3: torch.nn.BatchNorm3d}
CHANNELS = 3


def batches(size: int, axes: int, counts: list[int], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """The batch of each rank."""
    generator = torch.Generator().manual_seed(axes)
    shape = (CHANNELS, *[4] * axes)
    return [(torch.randn(count, *shape, generator=generator) * 3 + 10).to(dtype) for count in counts[:size]]


def pair(kind: Any, **options: Any) -> tuple[Any, Any]:
    """The module of one process, and the same for ranks."""
    single = kind(CHANNELS, **options)
    if single.affine:
        with torch.no_grad():
            single.weight.copy_(torch.tensor([0.5, -1.0, 2.0]))
            single.bias.copy_(torch.tensor([1.0, 0.0, -1.0]))
    return single, cdl.SyncBatchNorm.convert(copy.deepcopy(single))


def check(rank: int, single: Any, module: Any, parts: list[torch.Tensor], steps: int = 2, **tolerance: float) -> None:
    """Compare results, gradients and running statistics of some steps."""
    start = sum(len(part) for part in parts[:rank])
    for step in range(steps):
        joined = (torch.cat(parts) + step).requires_grad_()
        mine = (parts[rank] + step).requires_grad_()
        expected = single(joined)
        found = module(mine)
        torch.testing.assert_close(found, expected[start : start + len(mine)], **tolerance)
        factors = torch.linspace(-1, 1, joined.numel()).reshape(joined.shape).to(joined.dtype)
        (expected * factors).sum().backward()
        (found * factors[start : start + len(mine)]).sum().backward()
        torch.testing.assert_close(mine.grad, joined.grad[start : start + len(mine)], **tolerance)
        for one, other in zip(single.parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(cdl.allreduce(other.grad), one.grad, atol=1e-3, rtol=1e-3)
            one.grad = other.grad = None
        for name, value in single.named_buffers():
            torch.testing.assert_close(dict(module.named_buffers())[name], value, **tolerance)


@pytest.mark.parametrize("axes", [0, 1, 2, 3])
@pytest.mark.parametrize("counts", [[2, 2, 2], [3, 1, 2], [3, 0, 1]], ids=str)
def test_as_one_process_with_the_joined_batch(rank: int, size: int, axes: int, counts: list[int]) -> None:
    single, module = pair(KINDS[max(axes, 1)])
    check(rank, single, module, batches(size, axes, counts), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    "options",
    [{"affine": False}, {"momentum": None}, {"momentum": 0.7, "eps": 0.1}, {"track_running_stats": False}],
    ids=str,
)
def test_options(rank: int, size: int, options: dict[str, Any]) -> None:
    single, module = pair(torch.nn.BatchNorm2d, **options)
    check(rank, single, module, batches(size, 2, [1, 3, 2]), steps=3, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_types(rank: int, size: int, dtype: torch.dtype) -> None:
    parts = batches(size, 2, [2, 3, 1], dtype)
    single, module = pair(torch.nn.BatchNorm2d, dtype=dtype if dtype is torch.float64 else torch.float32)
    if dtype is torch.float64:
        check(rank, single, module, parts, atol=1e-11, rtol=1e-11)
        return
    found = module(parts[rank])
    assert found.dtype is dtype
    start = sum(len(part) for part in parts[:rank])
    expected = single(torch.cat(parts).float())[start : start + len(found)]
    torch.testing.assert_close(found.float(), expected, atol=0.05, rtol=0.02)


def test_a_large_mean_costs_no_digits(rank: int, size: int) -> None:
    parts = [part + 10_000 for part in batches(size, 1, [50, 20, 30])]
    _, module = pair(torch.nn.BatchNorm1d)
    found = module(parts[rank])
    wide, _ = pair(torch.nn.BatchNorm1d, dtype=torch.float64)
    start = sum(len(part) for part in parts[:rank])
    expected = wide(torch.cat(parts).double())[start : start + len(found)]
    torch.testing.assert_close(found.double(), expected, atol=2e-3, rtol=1e-3)


def test_evaluation_needs_no_other_rank(rank: int, size: int) -> None:
    single, module = pair(torch.nn.BatchNorm2d)
    part = batches(size, 2, [2, 2, 2])[0]
    single(part)
    module.eval()
    single.eval()
    module.load_state_dict(single.state_dict())
    single.load_state_dict(module.state_dict())
    if rank == 0:
        assert torch.equal(module(part), single(part))
    with torch.no_grad():
        module.train()
        assert module(part).shape == part.shape


def test_a_group(rank: int, size: int) -> None:
    with cdl.Group([rank]) as alone:
        single, _ = pair(torch.nn.BatchNorm2d)
        module = cdl.SyncBatchNorm.convert(copy.deepcopy(single), alone)
        part = batches(size, 2, [2, 3, 4])[rank]
        torch.testing.assert_close(copy.deepcopy(module)(part), single(part))


def test_convert(rank: int, size: int) -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, CHANNELS, 3),
        torch.nn.BatchNorm2d(CHANNELS),
        torch.nn.Sequential(torch.nn.ReLU(), torch.nn.BatchNorm2d(CHANNELS, affine=False)),
    ).eval()
    keys, weight = list(model.state_dict()), model[1].weight
    converted = cdl.SyncBatchNorm.convert(model)
    assert converted is model
    assert isinstance(model[1], cdl.SyncBatchNorm)
    assert isinstance(model[2][1], cdl.SyncBatchNorm)
    assert model[1].weight is weight
    assert list(model.state_dict()) == keys
    assert not model[1].training
    assert all(not tensor.is_meta for tensor in model.state_dict().values())


def test_errors_leave_everything_usable(rank: int, size: int) -> None:
    _, module = pair(torch.nn.BatchNorm1d)
    for wrong in (torch.ones(3), torch.ones(2, CHANNELS + 1)):
        with pytest.raises(dl_comm.ArgumentError, match="shape"):
            module(wrong)
    with pytest.raises(dl_comm.ArgumentError, match="more than 1 value"):
        module(torch.ones(int(rank == 0), CHANNELS))
    x = torch.randn(4, CHANNELS, requires_grad=True)
    (gradient,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable|once"):
        gradient.sum().backward()
    assert cdl.allreduce(1) == size


def test_training_ends_where_one_process_does(rank: int, size: int) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, CHANNELS), torch.nn.BatchNorm1d(CHANNELS), torch.nn.Linear(CHANNELS, 1)
    )
    ranked = cdl.SyncBatchNorm.convert(copy.deepcopy(model))
    x, y = torch.randn(4 * size, 4), torch.randn(4 * size, 1)
    single = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = cdl.DistributedOptimizer(torch.optim.SGD(ranked.parameters(), lr=0.1))
    for _ in range(5):
        for module, sgd, rows in ((model, single, slice(None)), (ranked, optimizer, slice(rank, None, size))):
            sgd.zero_grad()
            torch.nn.functional.mse_loss(module(x[rows]), y[rows]).backward()
            sgd.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(ranked.state_dict()[name], value, msg=name)


def test_buffers_can_be_broadcast_after_each_step(rank: int, size: int) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, CHANNELS), torch.nn.BatchNorm1d(CHANNELS))
    model[1].running_mean.fill_(rank)  # type: ignore[operator, union-attr]
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = cdl.DistributedOptimizer(sgd, broadcast_buffers=model)
    buffers = dict(model.named_buffers())
    assert not buffers["1.running_mean"].any(), "those of rank 0"
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + rank))).square().sum().backward()
        optimizer.step()
        for buffer in buffers.values():
            everywhere = cdl.all_gather(buffer.reshape(1, -1))
            assert (everywhere == everywhere[0]).all()
    with pytest.raises(dl_comm.DTypeError, match="module"):
        cdl.DistributedOptimizer(torch.optim.SGD(model.parameters()), broadcast_buffers=True)  # type: ignore[arg-type]


def test_compiles(rank: int, size: int) -> None:
    torch.compiler.reset()
    _, module = pair(torch.nn.BatchNorm1d)
    compiled = torch.compile(copy.deepcopy(module), backend="aot_eager")
    for length in (2, 5):
        x = torch.randn(length, CHANNELS, requires_grad=True)
        found, expected = compiled(x), module(x)
        torch.testing.assert_close(found, expected)
        ours, theirs = (torch.autograd.grad(each.square().sum(), x)[0] for each in (found, expected))
        torch.testing.assert_close(ours, theirs)
