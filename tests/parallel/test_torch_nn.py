"""dl_comm.torch.nn on 1, 2, 3 ranks: the results and gradients of one process."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import dl_comm  # noqa: E402
import dl_comm.torch as cdl  # noqa: E402
from dl_comm.torch.nn import BlockSequential, SplitLinear  # noqa: E402

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


def layers(dtype: torch.dtype = torch.float64, seed: int = 7) -> list[nn.Module]:
    """Layers of ten parameters, the same on all ranks for the same seed."""
    torch.manual_seed(seed)
    widths = [4, 9, 3, 8, 5, 1]
    made = [[nn.Linear(a, b), nn.Tanh()] for a, b in zip(widths, widths[1:], strict=False)]
    return [each.to(dtype) for pair in made for each in pair]


def joined_batch(step: int, ranks: int) -> torch.Tensor:
    """The joined batch of some ranks, of three samples each."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(3 * ranks, 4, generator=generator, dtype=torch.float64)


def part(joined: torch.Tensor, rank: int) -> torch.Tensor:
    return joined[3 * rank : 3 * rank + 3]


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


class TestBlockSequential:
    @pytest.mark.parametrize("blocks", [1, 2, 4, 10])
    @pytest.mark.parametrize("clears", [True, False])
    def test_training_is_that_of_one_process(self, rank: int, size: int, blocks: int, clears: bool) -> None:
        model, alone = BlockSequential(layers(seed=rank), blocks), nn.Sequential(*layers(seed=0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        expected = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            joined = joined_batch(step, size)
            for net, opt, x in ((model, optimizer, part(joined, rank)), (alone, expected, joined)):
                opt.zero_grad(set_to_none=clears)
                loss_of(net, x).backward()
            for (name, mine), whole in zip(model.named_parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, whole.grad, msg=name)
            for net, opt in ((model, optimizer), (alone, expected)):
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
                opt.step()
        for mine, whole in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine, whole)
        assert dl_comm.check_buffers_match([p.detach().numpy() for p in model.parameters()], 1) == 0

    def test_a_group_and_sums(self, rank: int, size: int, group: dl_comm.Group | None) -> None:
        ranks = range(size) if group is None else group.ranks
        model = BlockSequential(layers(seed=rank), 3, op="sum", group=group)
        alone = nn.Sequential(*layers(seed=ranks[0]))
        joined = joined_batch(0, size)
        for _ in range(2):
            model.zero_grad(set_to_none=False)
            loss_of(model, part(joined, rank)).backward()
        sum(loss_of(alone, part(joined, each)) for each in ranks).backward()
        for (name, mine), whole in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, whole.grad, msg=name)
        loss = loss_of(model, part(joined, rank))
        with pytest.raises(dl_comm.StateError, match="summed again"):
            model.synchronize()
        with pytest.raises(dl_comm.StateError, match="summed again"), model.no_sync():
            loss.backward()

    def test_parameters_and_gradients_lie_in_flat_blocks(self, rank: int) -> None:
        model = BlockSequential(layers(), 4)
        loss_of(model, joined_batch(rank, 1)).backward()
        values, gradients = model.parameter_blocks, model.gradient_blocks
        assert len(values) == len(gradients) == 4
        flat = torch.cat([parameter.flatten() for parameter in model.parameters()])
        assert torch.equal(torch.cat(values), flat)
        of_each = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        assert torch.equal(torch.cat(gradients), of_each)
        assert max(map(len, values)) < 0.5 * len(flat)
        with torch.no_grad():
            for value, gradient in zip(values, gradients, strict=True):
                value.sub_(gradient)
        torch.testing.assert_close(torch.cat([parameter.flatten() for parameter in model.parameters()]), flat - of_each)

    def test_a_block_starts_before_backward_ends(self, rank: int) -> None:
        model = BlockSequential(layers(), 5)
        started: list[list[bool]] = []
        first = next(model.parameters())
        first.register_hook(lambda _: started.append([block.work is not None for block in model._averager.blocks]))
        loss_of(model, joined_batch(rank, 1)).backward()
        assert started == [[False, True, True, True, True]]
        assert all(block.work is None for block in model._averager.blocks)

    def test_keys_slices_and_names_are_those_of_sequential(self) -> None:
        made = layers()
        names = OrderedDict((f"layer{i}", layer) for i, layer in enumerate(made))
        for modules in (made, nn.Sequential(*made), names):
            plain = nn.Sequential(
                modules
                if isinstance(modules, OrderedDict)
                else OrderedDict((str(i), layer) for i, layer in enumerate(made))
            )
            keys = list(plain.state_dict())
            before = {key: value.clone() for key, value in plain.state_dict().items()}
            model = BlockSequential(modules, 3)
            assert list(model.state_dict()) == keys
            assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
            model.load_state_dict({key: value + 1 for key, value in before.items()})
            assert float(model.parameter_blocks[0][0]) == float(before[keys[0]].flatten()[0]) + 1
            model.load_state_dict(before)
            assert type(model[:2]) is nn.Sequential
            assert model[0] is made[0]
            assert "blocks=3" in repr(model)
            del model

    @pytest.mark.parametrize("how", ["deepcopy", "pickle"])
    def test_a_copy_averages_its_own_gradients(self, rank: int, size: int, how: str) -> None:
        model = BlockSequential(layers(), 3)
        twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
        assert twin.parameter_blocks[0].data_ptr() != model.parameter_blocks[0].data_ptr()
        for net in (model, twin):
            loss_of(net, part(joined_batch(0, size), rank)).backward()
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
            assert one.grad is not other.grad

    def test_converted_modules_have_new_blocks(self, rank: int, size: int) -> None:
        model = nn.Sequential(BlockSequential(layers(), 3)).bfloat16()
        inner = model[0]
        assert [block.dtype for block in inner.parameter_blocks] == [torch.bfloat16] * 3
        x = part(joined_batch(0, size), rank).bfloat16()
        loss_of(model, x).backward()
        assert all(parameter.grad.dtype == torch.bfloat16 for parameter in model.parameters())
        gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        assert cdl.all_gather(gradients[None]).unique(dim=0).shape[0] == 1
        model.to("meta")

    def test_accumulation(self, rank: int, size: int) -> None:
        model, alone = BlockSequential(layers(), 3), nn.Sequential(*layers())
        for step in range(4):
            with model.no_sync():
                loss_of(model, part(joined_batch(step, size), rank)).backward()
            loss_of(alone, joined_batch(step, size)).backward()
        if size > 1:
            own_gradient = next(model.parameters()).grad.clone()
            assert cdl.all_gather(own_gradient[None]).unique(dim=0).shape[0] == size
        model.synchronize()
        # A further pass adds to the means.
        loss_of(model, part(joined_batch(4, size), rank)).backward()
        loss_of(alone, joined_batch(4, size)).backward()
        for (name, mine), whole in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, whole.grad, msg=name)

    def test_frozen_and_missing_parameters(self, rank: int, size: int) -> None:
        class Sometimes(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.used, self.unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * self.used if rank == 0 else x

        model = BlockSequential([nn.Linear(3, 3, bias=False), Sometimes(), nn.Linear(3, 1)], 3)
        model[2].requires_grad_(False)
        model(torch.ones(1, 3)).sum().backward()
        assert model[1].unused.grad is None
        assert model[2].weight.grad is None
        mean = (model[0].weight.sum(1) * model[2].weight[0]).detach() / size
        torch.testing.assert_close(model[1].used.grad, mean)
        model[2].requires_grad_(True)
        model.zero_grad()
        model(torch.full((1, 3), float(rank))).sum().backward()
        assert cdl.all_gather(model[2].weight.grad).unique(dim=0).shape[0] == 1

    def test_a_failed_backward_is_refused_until_the_gradients_are_cleared(self, rank: int, size: int) -> None:
        model = BlockSequential(layers(), 4)
        broken = True

        def fail(_: Any) -> None:
            if broken:
                raise RuntimeError("broken layer")

        next(model.parameters()).register_hook(fail)
        with pytest.raises(RuntimeError, match="broken layer"):
            loss_of(model, joined_batch(rank, 1)).backward()
        broken = False
        with pytest.raises(dl_comm.StateError, match="previous backward pass failed"):
            loss_of(model, joined_batch(rank, 1)).backward()
        model.zero_grad()
        loss_of(model, part(joined_batch(0, size), rank)).backward()
        alone = nn.Sequential(*layers())
        loss_of(alone, joined_batch(0, size)).backward()
        for mine, whole in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, whole.grad)

    @pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
    def test_changed_sparse_and_second_gradients_are_refused(self, rank: int) -> None:
        model = BlockSequential(layers(), 4)
        last, first = model[-2].weight, model[0].weight

        def change(_: Any) -> None:
            last.grad.mul_(2)

        handle = first.register_hook(change)
        with pytest.raises(dl_comm.StateError, match="8.weight was changed during its allreduce"):
            loss_of(model, joined_batch(rank, 1)).backward()
        handle.remove()
        model.zero_grad()
        with pytest.raises(dl_comm.StateError, match="create_graph"):
            loss_of(model, joined_batch(rank, 1)).backward(create_graph=True)
        model.zero_grad()
        sparse = BlockSequential([nn.Embedding(3, 2, sparse=True)], 1)
        with pytest.raises(dl_comm.DTypeError, match=r"0\.weight is sparse"):
            sparse(torch.tensor([1])).sum().backward()

    def test_errors_name_the_argument(self, rank: int, size: int) -> None:
        mixed = [nn.Linear(2, 2), nn.Linear(2, 2).double()]
        tied = [nn.Linear(2, 2), nn.Linear(2, 2)]
        tied[1].weight.data = tied[0].weight.data
        for error, text, modules, options in (
            (dl_comm.DTypeError, "modules is a Linear", nn.Linear(2, 2), {}),
            (dl_comm.DTypeError, "modules: entry 1", [nn.Linear(2, 2), 3], {}),
            (dl_comm.ArgumentError, "blocks", layers(), {"blocks": 0}),
            (dl_comm.ArgumentError, "blocks is 11", layers(), {"blocks": 11}),
            (dl_comm.ArgumentError, "blocks is 1", [nn.Tanh()], {}),
            (dl_comm.ArgumentError, "op", layers(), {"op": "max"}),
            (dl_comm.ArgumentError, "group", layers(), {"group": 1}),
            (dl_comm.ArgumentError, "broadcast", layers(), {"broadcast": "no"}),
            (dl_comm.DTypeError, "1.weight is of torch.float64", mixed, {}),
            (dl_comm.ArgumentError, "share memory", tied, {}),
            (dl_comm.ArgumentError, "meta", [nn.Linear(2, 2), nn.Linear(2, 2, device="meta")], {}),
            (dl_comm.ArgumentError, "lazy", [nn.LazyLinear(2)], {}),
        ):
            with pytest.raises(error, match=text):
                BlockSequential(modules, **{"blocks": 1, **options})
        model = BlockSequential(layers(), 2)
        with pytest.raises(dl_comm.ArgumentError, match="another DistributedOptimizer or BlockSequential averages"):
            cdl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(dl_comm.ArgumentError, match="another DistributedOptimizer or BlockSequential averages"):
            BlockSequential(list(model), 2)
        model.append(nn.Linear(1, 1).double())
        with pytest.raises(dl_comm.StateError, match="added, replaced or moved"):
            model(joined_batch(0, 1))
        assert cdl.allreduce(1) == size

    def test_after_a_join_parameters_must_be_broadcast(self, rank: int, size: int) -> None:
        model = BlockSequential(layers(), 3)
        for _ in range(rank + 1):
            model.zero_grad()
            loss_of(model, joined_batch(rank, 1)).backward()
        last = dl_comm.join()
        model.zero_grad()
        with pytest.raises(dl_comm.StateError, match="joined"):
            loss_of(model, joined_batch(rank, 1)).backward()
        cdl.broadcast_parameters(model, last)
        model.zero_grad()
        loss_of(model, joined_batch(rank, 1)).backward()
