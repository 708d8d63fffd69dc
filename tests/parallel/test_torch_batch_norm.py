"""What only torch has in batch normalization: options, groups, conversion, errors, training, buffers, the compiler."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dl_comm  # noqa: E402
import dl_comm.torch as cdl  # noqa: E402
import frameworks  # noqa: E402
import test_batch_norm  # noqa: E402

CHANNELS = 3


def pair(kind: Any, **options: Any) -> tuple[Any, Any]:
    """The module of one process, and the same for ranks."""
    single = kind(CHANNELS, **options)
    if single.affine:
        with torch.no_grad():
            single.weight.copy_(torch.tensor([0.5, -1.0, 2.0]))
            single.bias.copy_(torch.tensor([1.0, 0.0, -1.0]))
    return single, cdl.SyncBatchNorm.convert(copy.deepcopy(single))


@pytest.mark.parametrize("options", [{"momentum": None}, {"track_running_stats": False}], ids=str)
def test_options(rank: int, size: int, options: dict[str, Any]) -> None:
    framework = frameworks.get("torch")
    parts = test_batch_norm.batches(size, 2, [1, 3, 2], "float64")
    test_batch_norm.check(framework, test_batch_norm.TorchLayers(framework), "eager", parts, rank, 1e-11, **options)


def test_training_without_gradients(rank: int, size: int) -> None:
    _, module = pair(torch.nn.BatchNorm2d)
    part = torch.randn(2, CHANNELS, 4, 4)
    with torch.no_grad():
        assert module(part).shape == part.shape


def test_a_group(rank: int, size: int) -> None:
    with cdl.Group([rank]) as alone:
        single, _ = pair(torch.nn.BatchNorm2d)
        module = cdl.SyncBatchNorm.convert(copy.deepcopy(single), alone)
        part = torch.randn(2 + rank, CHANNELS, 4, 4)
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


@pytest.mark.costly
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
