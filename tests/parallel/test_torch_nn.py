"""dl_comm.torch.nn on 1, 2, 3 ranks: the results and gradients of one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import dl_comm  # noqa: E402
import dl_comm.torch as cdl  # noqa: E402
from dl_comm.torch.nn import SplitLinear  # noqa: E402

SPLITS = ("columns", "rows")


@pytest.fixture(params=["all", "some"])
def group(request: pytest.FixtureRequest, rank: int) -> Iterator[dl_comm.Group | None]:
    """All ranks; or the ranks 0 and 2, and rank 1."""
    if request.param == "all":
        yield None
        return
    made = dl_comm.split(rank % 2)
    assert made is not None
    with made:
        yield made


def linear(inputs: int, outputs: int, **options: Any) -> nn.Linear:
    """A layer, the same on all ranks."""
    torch.manual_seed(3)
    return nn.Linear(inputs, outputs, **{"dtype": torch.float64, **options})


def batch(features: int, *shape: int) -> torch.Tensor:
    """An input, the same on all ranks."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(*shape, features, generator=generator, dtype=torch.float64)


def own(layer: SplitLinear, whole: torch.Tensor | None, axis: int) -> torch.Tensor:
    """This rank's part of a tensor of the whole layer."""
    assert whole is not None
    return whole.split(layer.counts, axis)[layer.group.rank]


class TestSplitLinear:
    @pytest.mark.parametrize("split", SPLITS)
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("shape", [(4,), (2, 3), (), (0,)], ids=str)
    def test_results_and_gradients_are_those_of_one_layer(
        self, group: dl_comm.Group | None, split: Any, bias: bool, shape: tuple[int, ...]
    ) -> None:
        whole = linear(7, 5, bias=bias)
        layer = SplitLinear.from_linear(whole, split=split, group=group)
        x, same = (batch(7, *shape).requires_grad_() for _ in range(2))
        expected, found = whole(x), layer(same)
        torch.testing.assert_close(found, expected)
        assert found.is_contiguous()
        for result in (expected, found):
            result.sin().sum().backward()
        torch.testing.assert_close(same.grad, x.grad)
        axis = int(split == "rows")
        torch.testing.assert_close(layer.weight.grad, own(layer, whole.weight.grad, axis))
        if bias:
            assert layer.bias is not None
            of_bias = whole.bias.grad if axis else own(layer, whole.bias.grad, 0)
            torch.testing.assert_close(layer.bias.grad, of_bias)

    def test_a_pair_of_layers_makes_one_call(self, group: dl_comm.Group | None) -> None:
        first, second = linear(5, 8), linear(8, 3)
        one = SplitLinear.from_linear(first, group=group, gather=False)
        two = SplitLinear.from_linear(second, split="rows", group=group, split_input=False)
        x, same = (batch(5, 4).requires_grad_() for _ in range(2))
        hidden = one(same)
        assert hidden.shape == (4, one.counts[one.group.rank])
        expected, found = second(first(x).relu()), two(hidden.relu())
        torch.testing.assert_close(found, expected)
        for result in (expected, found):
            result.square().sum().backward()
        torch.testing.assert_close(same.grad, x.grad)
        torch.testing.assert_close(one.weight.grad, own(one, first.weight.grad, 0))
        torch.testing.assert_close(two.weight.grad, own(two, second.weight.grad, 1))

    @pytest.mark.parametrize("split", SPLITS)
    def test_gradients_of_gradients(self, size: int, split: Any) -> None:
        whole = linear(6, 4)
        layer = SplitLinear.from_linear(whole, split=split)
        found = []
        for module in (whole, layer):
            x = batch(6, 2).requires_grad_()
            (gradient,) = torch.autograd.grad(module(x).sin().sum(), x, create_graph=True)
            gradient.square().sum().backward()
            found.append((x.grad, module.weight.grad))
        torch.testing.assert_close(found[1][0], found[0][0])
        torch.testing.assert_close(found[1][1], own(layer, found[0][1], int(split == "rows")))

    def test_replicas_on_a_grid_train_as_one_process(self, rank: int, size: int) -> None:
        with dl_comm.grid(data=-1, model=2 if size % 2 == 0 else 1) as grid:
            layers = [linear(4, 6), nn.Tanh(), linear(6, 2)]
            alone = nn.Sequential(*copy.deepcopy(layers))
            model = nn.Sequential(
                SplitLinear.from_linear(layers[0], group=grid.model),
                nn.Tanh(),
                SplitLinear.from_linear(layers[2], split="rows", group=grid.model),
            )
            optimizer = cdl.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), group=grid.data
            )
            expected = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
            joined = batch(4, 4 * grid.shape["data"])
            mine = joined.chunk(grid.shape["data"])[grid.coordinates["data"]]
            for _ in range(4):
                for net, opt, x in ((model, optimizer, mine), (alone, expected, joined)):
                    opt.zero_grad()
                    (net(x) - 1).square().mean().backward()
                    opt.step()
            for split, whole in ((model[0], alone[0]), (model[2], alone[2])):
                found = split.to_linear()
                torch.testing.assert_close(found.weight, whole.weight)
                torch.testing.assert_close(found.bias, whole.bias)

    @pytest.mark.parametrize("split", SPLITS)
    def test_the_whole_layer(self, group: dl_comm.Group | None, split: Any) -> None:
        whole = linear(5, 6).eval()
        layer = SplitLinear.from_linear(whole, split=split, group=group)
        found = layer.to_linear()
        assert torch.equal(found.weight, whole.weight)
        assert torch.equal(found.bias, whole.bias)
        assert not layer.training
        assert not found.training
        assert found.weight.requires_grad

    @pytest.mark.parametrize("split", SPLITS)
    def test_new_parameters_are_as_those_of_linear(self, rank: int, size: int, split: Any) -> None:
        torch.manual_seed(7)  # equal seeds must not give equal parts
        layer = SplitLinear(64, 32, split=split)
        after = torch.get_rng_state()
        found = layer.to_linear().requires_grad_(False)
        assert cdl.all_gather(found.weight[None]).unique(dim=0).shape[0] == 1
        parts = cdl.all_gather_object(layer.weight.flatten()[:4].tolist())
        assert len(set(map(tuple, parts))) == size
        assert 0.9 / 8 < float(found.weight.abs().max()) <= 1 / 8
        assert abs(float(found.weight.mean())) < 0.01
        if split == "rows":
            assert cdl.all_gather(layer.bias.detach()[None]).unique(dim=0).shape[0] == 1
        assert torch.equal(cdl.broadcast([after.clone()])[0], after)
        torch.manual_seed(7)
        again = SplitLinear(64, 32, split=split)
        assert torch.equal(again.weight, layer.weight)

    def test_copies_types_and_state(self, group: dl_comm.Group | None) -> None:
        layer = SplitLinear(6, 4, group=group, dtype=torch.float32)
        twin = copy.deepcopy(layer)
        assert twin.group is layer.group
        twin.reset_parameters()
        assert not torch.equal(twin.weight, layer.weight)
        twin.load_state_dict(layer.state_dict())
        x = batch(6, 3)
        torch.testing.assert_close(twin.double()(x), layer(x.float()).double(), rtol=1e-5, atol=1e-5)
        assert list(layer.state_dict()) == ["weight", "bias"]
        assert "split='columns'" in repr(layer)
        half = SplitLinear.from_linear(linear(6, 4, dtype=torch.bfloat16), split="rows", group=group)
        assert half(x.bfloat16()).dtype == torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            assert SplitLinear(6, 4, split="rows", group=group)(x.float()).dtype == torch.bfloat16

    def test_errors_name_the_argument(self, rank: int, size: int) -> None:
        for wrong, name in (
            ({"in_features": 0, "out_features": 4}, "in_features"),
            ({"in_features": 4, "out_features": 1.5}, "out_features"),
            ({"in_features": 4, "out_features": 4, "split": "both"}, "split"),
            ({"in_features": 4, "out_features": 4, "split": "rows", "gather": False}, "gather"),
            ({"in_features": 4, "out_features": 4, "split_input": False}, "split_input"),
            ({"in_features": 4, "out_features": 4, "group": 0}, "group"),
            ({"in_features": 4, "out_features": 4, "bias": "no"}, "bias"),
        ):
            with pytest.raises(dl_comm.ArgumentError, match=name):
                SplitLinear(**wrong)
        if size > 1:
            for split, name in (("columns", "out_features"), ("rows", "in_features")):
                with pytest.raises(dl_comm.ArgumentError, match=f"{name} is 1; give at least one"):
                    SplitLinear(1 if split == "rows" else 4, 4 if split == "rows" else 1, split=split)
        with pytest.raises(dl_comm.DTypeError, match="linear is a ReLU"):
            SplitLinear.from_linear(nn.ReLU())
        for split in SPLITS:
            layer = SplitLinear(4, 4, split=split)
            for shape in ((3, 5), (3, 3), ()):
                with pytest.raises(dl_comm.ArgumentError, match="input has the shape"):
                    layer(torch.ones(shape))
        assert cdl.allreduce(1) == size

    def test_a_layer_of_other_ranks_is_refused(self, rank: int, size: int) -> None:
        if size == 1:
            pytest.skip("needs a group of another size")
        layer = SplitLinear(4, 4)
        with cdl.Group([rank]) as alone:
            layer._ranks.group = alone
            with pytest.raises(dl_comm.StateError, match="make it again"):
                layer(torch.ones(1, 4))

    @pytest.mark.costly
    @pytest.mark.parametrize("split", SPLITS)
    def test_the_compiler_takes_it(self, size: int, split: Any) -> None:
        torch.compiler.reset()
        layer = SplitLinear.from_linear(linear(6, 4), split=split)
        compiled = torch.compile(layer, backend="aot_eager")
        found = []
        for module in (layer, compiled):
            x = batch(6, 2).requires_grad_()
            layer.zero_grad()
            result = module(x)
            result.sin().sum().backward()
            found.append((result, x.grad, layer.weight.grad))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other)
