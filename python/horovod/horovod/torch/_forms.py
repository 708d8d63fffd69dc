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


def reduction(op: int, factors: Factors) -> dict[str, Any]:
    """The core's operator and factors, as options of a call."""
    if op not in _OPERATORS:
        raise ValueError(f"invalid op: {op!r} (expected hvd.Average, Sum, Adasum, Min, Max or Product)")
    return {"op": _OPERATORS[op], "prescale": float(factors[0]), "postscale": float(factors[1])}
