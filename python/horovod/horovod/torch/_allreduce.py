"""Allreduce, of one tensor and of lists.

Thread rule: that of `mpi_ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from horovod.common._calls import Call
from horovod.common.basics import HorovodBasics
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.util import get_average_backwards_compatibility_fun
from horovod.torch._forms import Factors, Tensors, checked, core, differentiable, first, of_gradient, reduction
from horovod.torch.compression import Compression

handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(HorovodBasics)


def _allreduce(
    kind: str,
    x: Iterable[Any],
    name: str | None,
    op: int,
    factors: Factors,
    process_set: ProcessSet,
    result: Callable[[Any], Any] = list,
    in_place: bool = False,
    is_async: bool = False,
) -> Any:
    """Reduces tensors, or starts it; ``result`` makes the result from those of the core."""
    given = checked(x)
    options = reduction(op, factors) | {"out": given if in_place else None}
    return Call(kind, name, process_set).make(core.allreduce, given, is_async=is_async, result=result, **options)


def _reduced(
    kind: str, x: Tensors, name: str | None, compression: Any, op: int, factors: Factors, process_set: ProcessSet
) -> list[Any]:
    return differentiable(
        lambda given: _allreduce(kind, given, name, op, factors, process_set),
        lambda grads: _reduced(kind, grads, of_gradient(name), Compression.none, op, factors, process_set),
        x,
        compression,
    )


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Returns the reduction of a tensor over the ranks.

    The gradient is reduced by the same operator and factors.

    Args:
        tensor: Of the same shape and type on all ranks.
        average: Deprecated: True for Average, False for Sum.
        name: What the ranks match.
        compression: How the values travel.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``.
        prescale_factor: A factor of the input.
        postscale_factor: A factor of the result.
        process_set: The ranks.

    Returns:
        A new tensor of the same shape and type.
    """
    op, factors = handle_average_backwards_compatibility(op, average), (prescale_factor, postscale_factor)
    found: torch.Tensor = _reduced("allreduce", [tensor], name, compression, op, factors, process_set)[0]
    return found


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Returns the reductions of a list of tensors, as one call; as ``allreduce``."""
    op, factors = handle_average_backwards_compatibility(op, average), (prescale_factor, postscale_factor)
    return _reduced("grouped_allreduce", tensors, name, compression, op, factors, process_set)


def _form(kind: str, *, in_place: bool = False, is_async: bool = False) -> Callable[..., Any]:
    """A form without gradients and compression; its documentation is that of the blocking form."""

    def run(x: Any, average: Any, name: Any, op: Any, before: float, after: float, process_set: ProcessSet) -> Any:
        op, grouped = handle_average_backwards_compatibility(op, average), kind.startswith("grouped")
        result = (lambda _: x) if in_place else list if grouped else first
        given = x if grouped else [x]
        return _allreduce(kind, given, name, op, (before, after), process_set, result, in_place, is_async)

    def of_one(
        tensor: torch.Tensor,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Any:
        return run(tensor, average, name, op, prescale_factor, postscale_factor, process_set)

    def of_many(
        tensors: Tensors,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Any:
        return run(tensors, average, name, op, prescale_factor, postscale_factor, process_set)

    form: Callable[..., Any] = of_many if kind == "grouped_allreduce" else of_one
    form.__name__ = form.__qualname__ = kind + "_async" * is_async + "_" * in_place
    form.__doc__ = f"Starts ``{kind}{'_' * in_place}``; returns a handle."
    if not is_async:
        form.__doc__ = f"Replaces tensors by their reduction over the ranks, as ``{kind}``. Not differentiable."
    return form


allreduce_async = _form("allreduce", is_async=True)
allreduce_ = _form("allreduce", in_place=True)
allreduce_async_ = _form("allreduce", in_place=True, is_async=True)
grouped_allreduce_async = _form("grouped_allreduce", is_async=True)
grouped_allreduce_ = _form("grouped_allreduce", in_place=True)
grouped_allreduce_async_ = _form("grouped_allreduce", in_place=True, is_async=True)
