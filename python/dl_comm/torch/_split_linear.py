"""A linear layer whose weight is split over the ranks of a group (tensor parallelism).

The four functions on activations are the conjugate pairs of Shoeybi et al. (2019), "Megatron-LM: Training
Multi-Billion Parameter Language Models Using Model Parallelism": copy and sum, split and gather. What one does in
forward, the other does in backward. They differ from the differentiable collectives, whose gradients are those of the
sum of all ranks' losses: here the ranks of the group compute one loss, each of them all of it.

Thread rule: as a torch module.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, cast

import torch

from dl_comm._arrays.groups import Group, given, world
from dl_comm._arrays.objects import broadcast_object
from dl_comm._base.checks import checked_flag, checked_int
from dl_comm._base.errors import ArgumentError, DTypeError, StateError
from dl_comm._job.start import ensure_initialized
from dl_comm.torch._arguments import KeptGroup
from dl_comm.torch._collectives import all_gather, allreduce

Split = Literal["columns", "rows"]


class SplitLinear(torch.nn.Module):
    """`torch.nn.Linear` with its weight split over the ranks of a group. Forward and backward are collective.

        layer = dl_comm.torch.nn.SplitLinear(784, 1000)               # each rank has its part of the 1000 outputs
        head = dl_comm.torch.nn.SplitLinear(1000, 10, split="rows")   # and of these 1000 inputs
        loss = criterion(head(layer(x).relu()), y)                    # as in one process, on every rank

    The ranks of the group are one worker: they get the same batch and compute the same loss, each of them all of it.
    Results and gradients (of the input, and of this rank's part of the weight and bias) are those of one `Linear` in
    one process; do not average them over the group. To train on several batches too, make a `dl_comm.grid(data=-1,
    model=2)`, give this layer `group=grid.model`, and the optimizer `group=grid.data`. Gradients of gradients are right
    too. New parameters have the distribution of `Linear`, from a seed that rank 0 of the group draws.

    `split="columns"`: rank i has part i of the outputs. Forward gathers them; backward sums the gradient of the input.
    `split="rows"`: rank i has part i of the inputs. Forward sums the ranks' products; backward gathers the gradient of
    the input. Every rank has the whole bias. Parts have `features // size` or one more features, the longer ones first.

    Two layers with fewer calls: columns with `gather=False`, then rows with `split_input=False` (not more; what is
    between them acts on each feature alone).

    Args:
        in_features: The extent of the last axis of the input.
        out_features: The extent of the last axis of the output.
        split: "columns" or "rows".
        group: The ranks; None: all. They all make the layer: that is collective.
        bias: Whether there is a bias.
        gather: False (columns only): the output has this rank's features only.
        split_input: False (rows only): the input has this rank's features only.
        device: Of the parameters.
        dtype: Of the parameters.

    Attributes:
        weight: This rank's part, of shape (outputs of this rank, `in_features`) or (`out_features`, inputs of this
            rank).
        bias: Of shape (outputs of this rank,) for columns, (`out_features`,) for rows. Or None.
        counts: The numbers of features of the ranks.
        group: The ranks.

    Raises:
        ArgumentError: An argument is out of range, or there are fewer features than ranks.
        StateError: `dl_comm.finalize` was called.

    Source: Shoeybi et al. (2019), "Megatron-LM".
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        split: Split = "columns",
        group: Group | None = None,
        bias: bool = True,
        gather: bool = True,
        split_input: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        ensure_initialized()
        self.in_features = checked_int("in_features", in_features, 1)
        self.out_features = checked_int("out_features", out_features, 1)
        if split not in ("columns", "rows"):
            raise ArgumentError(f"invalid split: {split!r} (expected 'columns' or 'rows')")
        self.split = split
        self.gather = checked_flag("gather", gather)
        self.split_input = checked_flag("split_input", split_input)
        if split == "rows" and not self.gather:
            raise ArgumentError("gather=False is for split='columns': a layer split by rows sums its outputs")
        if split == "columns" and not self.split_input:
            raise ArgumentError("split_input=False is for split='rows': a layer split by columns needs all inputs")
        given(group)
        self._ranks = KeptGroup(group)
        name = "out_features" if split == "columns" else "in_features"
        features: int = getattr(self, name)
        here = self.group
        if features < here.size:
            raise ArgumentError(f"{name} is {features}; give at least one to each of the {here.size} ranks")
        self.counts = tuple(features // here.size + (i < features % here.size) for i in range(here.size))
        self._rank = here.rank
        own = self.counts[here.rank]
        outputs, inputs = (own, self.in_features) if split == "columns" else (self.out_features, own)
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, device=device, dtype=dtype))
        self.bias: torch.nn.Parameter | None
        if checked_flag("bias", bias):
            self.bias = torch.nn.Parameter(torch.empty(outputs, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    @classmethod
    def from_linear(
        cls,
        linear: torch.nn.Linear,
        *,
        split: Split = "columns",
        group: Group | None = None,
        gather: bool = True,
        split_input: bool = True,
    ) -> SplitLinear:
        """Split a `torch.nn.Linear`, which is the same on all ranks of the group. No communication.

        Args:
            linear: It stays unchanged. The new layer has its values, device, dtype and mode.
            split: As in the constructor; so are the next three.
            group: The ranks.
            gather: Whether outputs are gathered.
            split_input: Whether forward takes all inputs.

        Returns:
            The layer.

        Raises:
            DTypeError: `linear` is not a `torch.nn.Linear`.
            ArgumentError: As the constructor.
        """
        if not isinstance(linear, torch.nn.Linear):
            raise DTypeError(f"linear is a {type(linear).__name__}, not a torch.nn.Linear")
        made = cls(
            linear.in_features,
            linear.out_features,
            split=split,
            group=group,
            bias=linear.bias is not None,
            gather=gather,
            split_input=split_input,
            device="meta",
            dtype=linear.weight.dtype,
        )
        axis, start = made._place()
        with torch.no_grad():
            part = linear.weight.narrow(axis, start, made.counts[made._rank])
            made.weight = torch.nn.Parameter(part.clone(memory_format=torch.contiguous_format))
            if linear.bias is not None:
                bias = linear.bias if axis == 1 else linear.bias.narrow(0, start, made.counts[made._rank])
                made.bias = torch.nn.Parameter(bias.clone())
        made.training = linear.training
        return made

    @torch.no_grad()
    def to_linear(self) -> torch.nn.Linear:
        """Return the whole layer, on every rank: for a checkpoint that does not depend on the number of ranks.

        Collective. Returns a new `torch.nn.Linear` of this layer's device, dtype and mode; it has no gradients. Raises
        `dl_comm.CommError` when the gathering fails.
        """
        axis, _ = self._place()
        made = torch.nn.Linear(self.in_features, self.out_features, self.bias is not None, "meta", self.weight.dtype)
        ranks = self._where()
        made.weight = torch.nn.Parameter(_joined(self.weight, axis, ranks))
        if self.bias is not None:
            made.bias = torch.nn.Parameter(_joined(self.bias, 0, ranks) if axis == 0 else self.bias.clone())
        made.training = self.training
        return made

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new parameters, with the distribution of `torch.nn.Linear`. Collective, except on the meta device.

        Every rank takes one number from torch's generator; that of rank 0 is the seed. The parameters of a seed depend
        on the number of ranks.
        """
        if self.weight.is_meta:
            return
        seed = broadcast_object(int(torch.randint(2**62, (), device="cpu")), 0, group=self._where().group)
        # Of the default initialization of Linear: uniform, with this bound, for the weight and the bias.
        bound = 1 / math.sqrt(self.in_features)
        of_part = torch.Generator().manual_seed(seed + 1 + self._rank)
        self._draw(self.weight, bound, of_part)
        if self.bias is not None:
            # The ranks of a layer that is split by rows have the same bias.
            self._draw(self.bias, bound, of_part if self.split == "columns" else torch.Generator().manual_seed(seed))

    @staticmethod
    def _draw(parameter: torch.Tensor, bound: float, generator: torch.Generator) -> None:
        values = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
        parameter.copy_(values.uniform_(-bound, bound, generator=generator))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply the layer. Collective.

        Args:
            input: Of shape (..., features), the same on all ranks of the group. The features are `in_features`, or
                those of this rank with `split_input=False`.

        Returns:
            A tensor of shape (..., features), the same on all ranks. The features are `out_features`, or those of this
            rank with `gather=False`.

        Raises:
            ArgumentError: `input` has another number of features.
            StateError: The ranks are not those that made the layer.
        """
        expected = self.in_features if self.split_input else self.counts[self._rank]
        if not input.dim() or input.shape[-1] != expected:
            raise ArgumentError(
                f"input has the shape {tuple(input.shape)}; its last axis must have {expected} features"
            )
        ranks = self._where()
        if self.split == "columns":
            result = torch.nn.functional.linear(_Copy.apply(input, ranks), self.weight, self.bias)
            return cast(torch.Tensor, _Gather.apply(result, ranks)) if self.gather else result
        part = _Split.apply(input, ranks) if self.split_input else input
        result = cast(torch.Tensor, _Sum.apply(torch.nn.functional.linear(part, self.weight), ranks))
        return result if self.bias is None else result + self.bias.to(result.dtype)

    def extra_repr(self) -> str:
        """Return what `print` shows of the layer."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, split={self.split!r}, "
            f"rank={self._rank} of {len(self.counts)}, bias={self.bias is not None}"
        )

    @property
    def group(self) -> Group:
        """The ranks."""
        return world() if self._ranks.group is None else self._ranks.group

    def _place(self) -> tuple[int, int]:
        """The axis of the weight that is split, and the first index of this rank's part."""
        return int(self.split == "rows"), sum(self.counts[: self._rank])

    def _where(self) -> _Ranks:
        group = self.group
        if (group.rank, group.size) != (self._rank, len(self.counts)):
            raise StateError(
                f"the layer was made by rank {self._rank} of {len(self.counts)}, and this is rank {group.rank} of "
                f"{group.size}: make it again, for example with SplitLinear.from_linear"
            )
        return _Ranks(group, self.counts)


class _Ranks(NamedTuple):
    """The ranks of a layer, and the numbers of features that they have."""

    group: Group
    counts: tuple[int, ...]


def _joined(part: torch.Tensor, axis: int, ranks: _Ranks) -> torch.Tensor:
    """The parts of all ranks, joined along an axis. The collective joins along the first."""
    first = part.movedim(axis, 0).contiguous()
    joined: torch.Tensor = all_gather(first, counts=ranks.counts, group=ranks.group, name="SplitLinear")
    return joined.movedim(0, axis).contiguous()


class _Copy(torch.autograd.Function):
    """The input of all ranks, in which each rank's result is a summand of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: _Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, None]:
        return _Sum.apply(grad, ctx.ranks), None


class _Sum(torch.autograd.Function):
    """The sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: _Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        result: torch.Tensor = allreduce(x.contiguous(), group=ranks.group, name="SplitLinear")
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, None]:
        return _Copy.apply(grad, ctx.ranks), None


class _Split(torch.autograd.Function):
    """This rank's features of an input of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: _Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        here = ranks.group.rank
        return x.narrow(-1, sum(ranks.counts[:here]), ranks.counts[here])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, None]:
        return _Gather.apply(grad, ctx.ranks), None


class _Gather(torch.autograd.Function):
    """The features of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: _Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        return _joined(x, -1, ranks)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, None]:
        return _Split.apply(grad, ctx.ranks), None
