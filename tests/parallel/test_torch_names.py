"""Ranks that list the same parameters in other orders, under other names, or only some of them: 1, 2 and 3 ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import dl_comm  # noqa: E402
import dl_comm.torch as cdl  # noqa: E402

Pairs = list[tuple[str, torch.Tensor]]


def make_model(layers: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4, dtype=torch.float64) for _ in range(layers)))


def rotated(pairs: Any, by: int) -> list[Any]:
    listed = list(pairs)
    return listed[2 * by :] + listed[: 2 * by]


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int = 3) -> None:
    for _ in range(number):
        optimizer.zero_grad()
        model(torch.full((2, 4), rank + 1.0, dtype=torch.float64)).pow(2).mean().backward()
        optimizer.step()


def expected(size: int, number: int = 3, layers: int = 3) -> list[torch.Tensor]:
    """The parameters of one process with the batches of all ranks."""
    model = make_model(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(number):
        optimizer.zero_grad()
        batches = (torch.full((2, 4), rank + 1.0, dtype=torch.float64) for rank in range(size))
        (sum(model(batch).pow(2).mean() for batch in batches) / size).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def assert_equal(model: nn.Module, size: int) -> None:
    for own, right in zip(model.parameters(), expected(size), strict=True):
        torch.testing.assert_close(own.detach(), right)


class TestOptimizer:
    @pytest.mark.parametrize("bucket_mb", [None, 1e-9])
    @pytest.mark.parametrize("broadcast", [True, False])
    @pytest.mark.parametrize("given", ["names", "modules", "pairs"])
    def test_another_order(self, given: str, broadcast: bool, bucket_mb: float | None, rank: int, size: int) -> None:
        model = make_model()
        pairs = rotated(model.named_parameters(), rank)
        optimizer = torch.optim.SGD(pairs if given == "pairs" else [p for _, p in pairs], lr=0.1)
        names = pairs if given == "names" else None
        optimizer = cdl.DistributedOptimizer(
            optimizer, named_parameters=names, broadcast=broadcast, bucket_mb=bucket_mb
        )
        steps(model, optimizer, rank)
        assert_equal(model, size)

    def test_a_wrapper_on_one_rank(self, rank: int, size: int) -> None:
        model = make_model()
        wrapper = nn.ModuleDict({"model": model}) if rank else model
        pairs = rotated(wrapper.named_parameters(), rank)
        optimizer = cdl.DistributedOptimizer(torch.optim.SGD([p for _, p in pairs], lr=0.1), named_parameters=pairs)
        steps(model, optimizer, rank)
        assert_equal(model, size)

    def test_names_that_differ_and_mean_nothing(self, rank: int, size: int) -> None:
        """A rank has put the layers into other modules: their names are other ones, and their positions count."""
        model = make_model()
        inside = nn.ModuleDict({f"layer{rank}": model[0], f"after{rank}": model[1:]})
        optimizer = cdl.DistributedOptimizer(torch.optim.SGD(inside.parameters(), lr=0.1))
        del model[1:]
        steps(nn.Sequential(model, *inside[f"after{rank}"]), optimizer, rank)
        assert_equal(inside, size)

    def test_a_module_that_only_one_rank_has(self, rank: int, size: int) -> None:
        """As for evaluation: it has other names for some parameters."""
        model = make_model()
        evaluation = nn.ModuleList([model[1]]) if rank else None
        optimizer = cdl.DistributedOptimizer(torch.optim.SGD(rotated(model.parameters(), rank), lr=0.1))
        steps(model, optimizer, rank)
        assert_equal(model, size)
        del evaluation

    def test_a_group_in_another_order(self, rank: int, size: int) -> None:
        model = make_model()
        optimizer = cdl.DistributedOptimizer(torch.optim.SGD(model[0].parameters(), lr=0.1))
        added = rotated([*model[1].parameters(), *model[2].parameters()], rank % 2)
        optimizer.add_param_group({"params": added})
        steps(model, optimizer, rank)
        assert_equal(model, size)

    def test_other_given_names(self, rank: int, size: int) -> None:
        if size == 1:
            pytest.skip("needs two ranks")
        model = make_model()
        pairs = [(f"{name}{'x' * (rank == 1 and '2.' in name)}", p) for name, p in model.named_parameters()]
        with pytest.raises(dl_comm.MismatchError) as failure:
            cdl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=pairs)
        for line in ("0.weight, 0.bias, 1.weight, 1.bias, 2.weight, 2.bias\n", "2.weightx, 2.biasx"):
            assert line in str(failure.value)
        assert cdl.average(float(rank)) == (size - 1) / 2

    def test_another_layer_is_frozen(self, rank: int, size: int) -> None:
        if size == 1:
            pytest.skip("needs two ranks")
        model = make_model()
        optimizer = cdl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        steps(model, optimizer, rank)
        model[rank % 2].requires_grad_(False)
        optimizer.zero_grad()
        with pytest.raises(dl_comm.MismatchError) as failure:
            model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
        assert "'0.weight'" in str(failure.value)
        assert "'1.weight'" in str(failure.value)
        optimizer.zero_grad()

    def test_parameters_without_a_gradient(self, rank: int, size: int) -> None:
        """Each rank uses another layer."""
        model = make_model()
        pairs = rotated(model.named_parameters(), rank)
        optimizer = cdl.DistributedOptimizer(torch.optim.SGD([p for _, p in pairs], lr=1.0))
        start = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.zero_grad()
        model[rank % 3](torch.ones(1, 4, dtype=torch.float64)).sum().backward()
        optimizer.step()
        for i, (before, after) in enumerate(zip(start, model.parameters(), strict=True)):
            users = sum(other % 3 == i // 2 for other in range(size))
            torch.testing.assert_close(before - after.detach(), torch.full_like(before, users / size))


class TestBroadcastParameters:
    @pytest.mark.parametrize("make", [dict, list], ids=["mapping", "pairs"])
    def test_another_order(self, make: Callable[[Any], Any], rank: int, size: int) -> None:
        tensors = {name: torch.full((2,), i + 10.0 * rank) for i, name in enumerate("cab")}
        order = sorted(tensors, reverse=bool(rank % 2))
        cdl.broadcast_parameters(make((name, tensors[name]) for name in order), root=size - 1)
        for i, name in enumerate("cab"):
            assert tensors[name].tolist() == [i + 10.0 * (size - 1)] * 2

    def test_other_names(self, rank: int, size: int) -> None:
        if size == 1:
            pytest.skip("needs two ranks")
        tensors = [(f"layer{i + (rank and i > 20)}", torch.full((2,), float(rank))) for i in range(30)]
        with pytest.raises(dl_comm.MismatchError) as failure:
            cdl.broadcast_parameters(tensors)
        assert "'layer22'" in str(failure.value)
        assert all((tensor == rank).all() for _, tensor in tensors)
        assert cdl.average(float(rank)) == (size - 1) / 2

    @pytest.mark.parametrize("names", [["a\nb", "c"], ["a\x1fc", "b"], ["a\ud800", "b"]])
    def test_names_with_special_characters(self, names: list[str], rank: int, size: int) -> None:
        """What separates names in a list does not make different lists equal."""
        for others in (names, ["a", "b\nc"], ["b\x1fc", "b"], ["a\udfff", "b"]):
            listed = names if rank == 0 else others
            tensors = {name: torch.full((2,), i + 10.0 * rank) for i, name in enumerate(sorted(listed))}
            if size > 1 and others != names:
                with pytest.raises(dl_comm.MismatchError):
                    cdl.broadcast_parameters(tensors)
            else:
                cdl.broadcast_parameters(dict(rotated(tensors.items(), rank)))
                assert [tensors[name].tolist() for name in sorted(names)] == [[0.0] * 2, [1.0] * 2]

    def test_an_entry_that_one_rank_cannot_send(self, rank: int, size: int) -> None:
        """Its next call does not match the one of the others."""
        for step in range(2):
            tensors: Any = {"a": torch.full((2,), float(10 * step + rank))}
            if step == 0 and rank == size - 1:
                tensors["b"] = "no tensor"
            if step == 0:
                with pytest.raises(dl_comm.DTypeError if rank == size - 1 else dl_comm.MismatchError, match="b is of"):
                    cdl.broadcast_parameters(tensors)
            else:
                cdl.broadcast_parameters(tensors)
                assert tensors["a"].tolist() == [10.0, 10.0]


class TestOptimizerState:
    @pytest.mark.parametrize("wrapped", [True, False])
    def test_has_the_types_of_the_root(self, wrapped: bool, rank: int, size: int) -> None:
        parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizer = torch.optim.NAdam([parameter], lr=1e-3)
        if wrapped:
            optimizer = cdl.DistributedOptimizer(optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            (parameter.sum() * (rank + 1)).backward()
            optimizer.step()
        root = size - 1
        state = optimizer.state[parameter]
        state["master"] = {"weights": [torch.full((3,), 1 + 2**-12 + rank)]}
        if rank != root:
            state["mu_product"] = state["mu_product"] + 1
        own = state["mu_product"].clone()
        cdl.broadcast_optimizer_state(optimizer, root)
        state = optimizer.state[parameter]
        assert state["mu_product"].dtype == torch.float32
        assert torch.equal(state["mu_product"], cdl.broadcast_object(own, root))
        (weights,) = state["master"]["weights"]
        assert weights.dtype == torch.float32
        assert weights.tolist() == [1 + 2**-12 + root] * 3
        assert state["exp_avg"].dtype == torch.bfloat16
        optimizer.step()

    def test_belongs_to_the_parameters_of_the_same_name(self, rank: int, size: int) -> None:
        model = make_model()
        optimizer = torch.optim.SGD([p for _, p in rotated(model.named_parameters(), rank)], lr=0.1 + rank, momentum=1)
        steps(model, optimizer, rank, 1)
        for i, parameter in enumerate(model.parameters()):
            optimizer.state[parameter]["momentum_buffer"].fill_(i + 10 * rank)
        cdl.broadcast_optimizer_state(optimizer, size - 1)
        assert optimizer.param_groups[0]["lr"] == 0.1 + (size - 1)
        for i, parameter in enumerate(model.parameters()):
            assert (optimizer.state[parameter]["momentum_buffer"] == i + 10 * (size - 1)).all()

    def test_other_groups(self, rank: int, size: int) -> None:
        if size == 1:
            pytest.skip("needs two ranks")
        model = make_model()
        groups = [{"params": model[:2].parameters()}, {"params": model[2].parameters()}]
        optimizer = torch.optim.SGD(model.parameters() if rank else groups, lr=0.1)
        with pytest.raises(dl_comm.ArgumentError, match="parameter groups"):
            cdl.broadcast_optimizer_state(optimizer)
        assert cdl.average(float(rank)) == (size - 1) / 2
