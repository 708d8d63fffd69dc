"""Batch normalization over the joined batch of all ranks.

One allreduce in forward gives every rank the counts, means and sums of squared deviations of all ranks, which are
combined as in Chan, Golub and LeVeque (1983), "Algorithms for computing the sample variance": a sum of squares would
lose digits where the mean is large. One allreduce in backward adds up the two sums that the gradient needs.

Thread rule: as a torch module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from dl_comm._arrays.groups import Group
from dl_comm._base.errors import ArgumentError
from dl_comm.torch._arguments import KeptGroup, place
from dl_comm.torch._collectives import sum_at


class SyncBatchNorm(_BatchNorm):
    """`torch.nn.BatchNorm1d`, 2d and 3d with statistics of the joined batch of all ranks. Collective in training.

    Forward and backward give the results of one process with the joined batch. Ranks may have different numbers of
    samples, also none. Gradients of `weight` and `bias` are those of this rank's samples, as those of every other
    parameter; an optimizer averages them. In `eval`, running statistics are used, without communication. Gradients of
    gradients are refused.

    Args:
        num_features: The number of channels: the extent of the second axis.
        eps: As in `torch.nn.BatchNorm2d`; so are the next three, and the state dict.
        momentum: None: a cumulative mean.
        affine: Whether there are `weight` and `bias`.
        track_running_stats: Whether there are `running_mean` and `running_var`.
        group: The ranks; None: all.
        device: Of the parameters.
        dtype: Of the parameters.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        group: Group | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self._ranks = KeptGroup(group)

    @classmethod
    def convert(cls, module: torch.nn.Module, group: Group | None = None) -> torch.nn.Module:
        """Replace the `BatchNorm*` in a module by `SyncBatchNorm` with the same parameters and buffers.

        Args:
            module: It is changed, except if it is a `BatchNorm*` itself.
            group: The ranks; None: all.

        Returns:
            The module.
        """
        if isinstance(module, _BatchNorm):
            made = cls(
                module.num_features,
                module.eps,
                module.momentum,
                module.affine,
                module.track_running_stats,
                group,
                device="meta",
            )
            made._parameters.update(module._parameters)
            made._buffers.update(module._buffers)
            made.training = module.training
            return made
        converted: dict[torch.nn.Module, torch.nn.Module] = {}
        for name, child in list(module._modules.items()):
            if child is not None:
                if child not in converted:
                    converted[child] = cls.convert(child, group)
                setattr(module, name, converted[child])
        return module

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ArgumentError(f"expected samples, channels and other axes, got the shape {tuple(input.shape)}")
        if input.shape[1] != self.num_features:
            raise ArgumentError(f"expected {self.num_features} channels, got the shape {tuple(input.shape)}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize a tensor of the shape (samples, channels, ...)."""
        self._check_input_dim(input)
        if not self.training and self.running_mean is not None:
            normalized: torch.Tensor = torch.nn.functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
            return normalized
        # The communicator may be another one in backward.
        where = place(self._ranks.group, 1)
        count, mean, squares = _joined_statistics(input.detach(), where)
        variance = squares / count
        if self.training and self.running_mean is not None:
            self._update(mean, squares / (count - 1))
        result: torch.Tensor = _Normalize.apply(
            input, self.weight, self.bias, mean, torch.rsqrt(variance + self.eps), count, where
        )
        return result

    @torch.no_grad()
    def _update(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:
                factor = 1.0 / float(self.num_batches_tracked)
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            if running is not None:
                running.lerp_(new.to(running.dtype), factor or 0.0)


def _joined_statistics(x: torch.Tensor, where: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the number of a channel's values on all ranks, the means, and sums of squared deviations; in float64."""
    axes = [axis for axis in range(x.dim()) if axis != 1]
    channels = x.shape[1]
    _, rank, size = where
    rows = torch.zeros((size, 2 * channels + 1), dtype=torch.float64, device=x.device)
    own = x.numel() // channels
    if own:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        variance, mean = torch.var_mean(wide, axes, correction=0)
        rows[rank, :channels] = mean
        rows[rank, channels:-1] = variance * own
        rows[rank, -1] = own
    # Each rank has a row; allreduce works on GPUs too.
    sum_at(where, rows, "SyncBatchNorm")
    counts, means, squares = rows[:, -1:], rows[:, :channels], rows[:, channels:-1]
    total = counts.sum()
    if own <= 1 and total <= 1:  # in this order: reading a number from a GPU waits for it
        raise ArgumentError(f"expected more than 1 value per channel on all ranks, got {int(total)}")
    joined = (counts * means).sum(0) / total
    return total, joined, squares.sum(0) + (counts * (means - joined).square()).sum(0)


class _Normalize(torch.autograd.Function):
    """(x - mean) * scale * weight + bias, where mean and scale are functions of the x of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        scale: torch.Tensor,
        count: torch.Tensor,
        where: tuple[int, int, int],
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, mean, scale, count)
        ctx.where = where
        wide = _accumulator(x)
        factor = scale if weight is None else scale * weight
        result = (x - _per_channel(mean, x, wide)) * _per_channel(factor, x, wide)
        if bias is not None:
            result = result.add_(_per_channel(bias, x, wide))
        return result.to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, scale, count = ctx.saved_tensors
        axes = [axis for axis in range(x.dim()) if axis != 1]
        wide = _accumulator(x)
        centered = x - _per_channel(mean, x, wide)
        grad = grad.to(wide)
        # The gradients of bias, and of weight / scale.
        sums = torch.stack([grad.sum(axes), (grad * centered).sum(axes)]).double()
        of_weight = of_bias = of_x = None
        if weight is not None:
            of_weight, of_bias = (sums[1] * scale).to(weight.dtype), sums[0].to(weight.dtype)
        if ctx.needs_input_grad[0]:
            total = sum_at(ctx.where, sums.clone(), "SyncBatchNorm.gradient") / count
            factor = scale if weight is None else scale * weight
            of_x = grad - _per_channel(total[0], x, wide)
            of_x.sub_(centered.mul_(_per_channel(total[1] * scale.square(), x, wide)))
            of_x = of_x.mul_(_per_channel(factor, x, wide)).to(x.dtype)
        return of_x, of_weight, of_bias, None, None, None, None


def _accumulator(x: torch.Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def _per_channel(values: torch.Tensor, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View values of channels so that they are broadcast over `x`."""
    return values.to(dtype).reshape(1, -1, *[1] * (x.dim() - 2))
