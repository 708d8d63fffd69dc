"""Second derivatives: the graph of a gradient from `backward(create_graph=True)` goes through its average.

The mean of the gradients depends on the parameters of all ranks, which are equal. So its derivative by a parameter is
the mean of the ranks' derivatives, as in one process with the whole batch. To differentiate a mean is collective: each
mean that is differentiated makes a call, and each parameter that the pass reaches. So the ranks must use the same
parameters in the same order; otherwise they raise MismatchError.

Thread rule: as autograd's, one backward pass at a time.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from dl_comm._arrays.groups import world
from dl_comm.torch import _backward
from dl_comm.torch._collectives import allreduce

# The parameters whose derivatives are averaged in passes that go through a mean.
_hooked = WeakTensorKeyDictionary()


class _Mean(torch.autograd.Function):
    """A mean that has been computed already, as a function of this rank's gradient."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, mean: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        return mean.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        _backward.mark_pass()
        return _average(upstream[0], ctx.name), None, None


class _Unused(torch.autograd.Function):
    """The gradient of a rank that does not use the parameter: zeros, for any parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(parameter)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        return torch.zeros_like(upstream[0])


def differentiable_mean(
    name: str, parameter: torch.Tensor, gradient: torch.Tensor | None, mean: torch.Tensor
) -> torch.Tensor:
    """Return the mean of the ranks' gradients of a parameter as a function of `gradient`, that of this rank."""
    if parameter not in _hooked:
        _hooked[parameter] = True
        parameter.register_hook(functools.partial(_of_parameter, name))  # type: ignore[no-untyped-call]
    with torch.enable_grad():
        own = gradient if gradient is not None and gradient.requires_grad else _Unused.apply(parameter)
        result: torch.Tensor = _Mean.apply(own, mean, name)
        return result


def _of_parameter(name: str, derivative: torch.Tensor) -> torch.Tensor | None:
    return _average(derivative, name) if _backward.is_marked() else None


def _average(derivative: torch.Tensor, name: str) -> torch.Tensor:
    mean: torch.Tensor = allreduce(derivative.detach(), "mean", group=world(), name=f"{name}: second derivative")
    if torch.is_grad_enabled() and derivative.requires_grad:
        mean = _Mean.apply(derivative, mean, name)
    return mean
