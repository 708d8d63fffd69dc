"""What the collectives share: checks of tensors, gradients, operators and factors.

Thread rule: any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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


def checked(given: Iterable[Any]) -> list[torch.Tensor]:
    """Returns the tensors of a call, detached from the graph."""
    found = []
    for tensor in given:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"expected a tensor, not a {type(tensor).__name__}")
        if tensor.layout is not torch.strided or not tensor.is_contiguous():
            raise ValueError("Tensor is required to be contiguous.")
        found.append(tensor.detach() if tensor.requires_grad else tensor)
    if not found:
        raise ValueError("the list has no tensors")
    return found


def first(results: Any) -> Any:
    """The result of a call on one tensor."""
    return results[0]


class _Function(torch.autograd.Function):
    """A collective: ``run`` gets the tensors, ``gradient`` the contiguous gradients of the results."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], gradient: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        ctx.gradient = gradient
        return tuple(run(tensors))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, *ctx.gradient([grad.contiguous() for grad in grads])


def differentiable(
    run: Callable[..., Any], gradient: Callable[..., Any], tensors: Tensors, compression: Any = None
) -> list[Any]:
    """Returns the results of ``run`` of a list of tensors, which travel compressed.

    ``gradient`` gives the gradients of the compressed tensors from those of the results.
    """
    small = [(each, None) if compression is None else compression.compress(each) for each in tensors]
    given = [each for each, _ in small]
    learns = torch.is_grad_enabled() and any(getattr(each, "requires_grad", False) for each in given)
    results = _Function.apply(run, gradient, *given) if learns else run(given)
    if compression is None:
        return list(results)
    return [compression.decompress(each, context) for each, (_, context) in zip(results, small, strict=True)]


def of_gradient(name: str | None) -> str | None:
    return None if name is None else f"{name}.gradient"


def reduction(op: int, factors: Factors) -> dict[str, Any]:
    """The core's operator and factors, as options of a call."""
    if op not in _OPERATORS:
        raise ValueError(f"invalid op: {op!r} (expected hvd.Average, Sum, Adasum, Min, Max or Product)")
    return {"op": _OPERATORS[op], "prescale": float(factors[0]), "postscale": float(factors[1])}
