"""What the collectives share: checks of tensors, gradients, operators and factors.

Thread rule: any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import dl_comm.torch

core: Any = dl_comm.torch
"""Whose overloads do not know options of names."""
Average, Sum, Adasum, Min, Max, Product = range(6)
Factors = tuple[float, float]
"""Of the input, and of the result."""
Tensors = Sequence[torch.Tensor]

_OPERATORS = {Average: "mean", Sum: "sum", Adasum: "adasum", Min: "min", Max: "max", Product: "product"}


def checked(x: Any, *, grouped: bool) -> list[torch.Tensor]:
    """Returns the tensors of a call, detached from the graph."""
    found = []
    for tensor in x if grouped else (x,):
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"expected a tensor, not a {type(tensor).__name__}")
        if tensor.layout is not torch.strided or not tensor.is_contiguous():
            raise ValueError("Tensor is required to be contiguous.")
        found.append(tensor.detach() if tensor.requires_grad else tensor)
    if not found:
        raise ValueError("the list has no tensors")
    return found


class _Function(torch.autograd.Function):
    """A collective: ``run`` gets the tensors, ``gradient`` the contiguous gradients of the results."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], gradient: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        ctx.gradient = gradient
        return run(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, *ctx.gradient([grad.contiguous() for grad in grads])


def differentiable(run: Callable[..., Any], gradient: Callable[..., Any], tensors: Tensors) -> Any:
    if torch.is_grad_enabled() and any(getattr(tensor, "requires_grad", False) for tensor in tensors):
        return _Function.apply(run, gradient, *tensors)
    return run(*tensors)


def of_gradient(name: str | None) -> str | None:
    return None if name is None else f"{name}.gradient"


def scale(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    if factor == 1.0:
        return tensor
    wide = tensor.dtype
    if not tensor.is_floating_point():
        wide = torch.float64
    elif tensor.element_size() == 2 and tensor.device.type == "cpu":
        wide = torch.float32
    return (tensor.to(wide) * factor).to(tensor.dtype)


def core_factors(
    op: int, before: float, after: float, count: int, tensors: list[torch.Tensor]
) -> tuple[str, dict[str, float], list[torch.Tensor], float]:
    """Returns the core's operator and factors, the tensors to reduce, and the factor of the results."""
    if before == 1.0 == after:
        try:
            return _OPERATORS[op], {}, tensors, 1.0
        except KeyError:
            raise ValueError(f"invalid op: {op!r} (expected hvd.Average, Sum, Adasum, Min, Max or Product)") from None
    if op == Average:
        op, after = Sum, after / count
    if op == Sum and all(tensor.is_floating_point() for tensor in tensors):
        return "sum", {"prescale": float(before), "postscale": float(after)}, tensors, 1.0
    return _OPERATORS[op], {}, [scale(tensor, before) for tensor in tensors], after
