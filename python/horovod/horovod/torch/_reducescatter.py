"""Reduce-scatter: the first ranks get one row more.

Thread rule: that of `mpi_ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from horovod.common._calls import Call
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch._allgather import gathered
from horovod.torch._forms import (
    Average,
    Factors,
    Sum,
    Tensors,
    checked,
    core,
    differentiable,
    first,
    of_gradient,
    reduction,
)
from horovod.torch.compression import Compression


def _reducescatter(
    kind: str,
    x: Iterable[Any],
    name: str | None,
    op: int,
    process_set: ProcessSet,
    factors: Factors,
    result: Callable[[Any], Any] = list,
    is_async: bool = False,
) -> Any:
    """Reduces and scatters tensors, or starts it; ``result`` makes the result from those of the core."""
    given = checked(x)
    if op not in (Average, Sum):
        raise NotImplementedError("reducescatter has the operators hvd.Average and hvd.Sum only")
    if not all(tensor.dim() for tensor in given):
        raise RuntimeError("reducescatter takes tensors with at least one axis")
    call, options = Call(kind, name, process_set), reduction(op, factors)
    count = call.group.size
    if any(tensor.shape[0] % count for tensor in given):
        rows = [tensor.shape[0] for tensor in given]
        options["counts"] = [[(each + count - 1 - place) // count for place in range(count)] for each in rows]
    return call.make(core.reduce_scatter, given, is_async=is_async, result=result, **options)


def _scattered(
    kind: str, x: Tensors, name: str | None, compression: Any, op: int, process_set: ProcessSet, factors: Factors
) -> list[Any]:
    def gradient(grads: list[torch.Tensor]) -> list[torch.Tensor]:
        factor = (process_set.size() or 1 if op == Sum else 1) * factors[0] * factors[1]
        scaled = [grad * factor for grad in grads]
        return gathered(kind.replace("reducescatter", "allgather"), scaled, of_gradient(name), process_set)

    return differentiable(
        lambda given: _reducescatter(kind, given, name, op, process_set, factors), gradient, x, compression
    )


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts ``reducescatter``; returns a handle."""
    factors = prescale_factor, postscale_factor
    return int(_reducescatter("reducescatter", [tensor], name, op, process_set, factors, first, True))


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts ``grouped_reducescatter``; returns a handle."""
    factors = prescale_factor, postscale_factor
    return int(_reducescatter("grouped_reducescatter", tensors, name, op, process_set, factors, list, True))


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Returns this rank's rows of the reduction of a tensor over the ranks.

    The gradients are gathered, multiplied by the number of ranks for Sum, and by the factors; for Average they are not
    divided.

    Args:
        tensor: Of the shape ``(n, *rest)``, the same on all ranks. If ``n`` is no multiple of the number of ranks, the
            first ranks get one row more.
        name: What the ranks match.
        compression: How the values travel.
        op: ``Average`` or ``Sum``.
        process_set: The ranks.
        prescale_factor: A factor of the input.
        postscale_factor: A factor of the result.

    Returns:
        A new tensor.

    Raises:
        RuntimeError: Of another operator, or of a tensor without axes, beside the errors of all collectives.
    """
    factors = prescale_factor, postscale_factor
    found: torch.Tensor = _scattered("reducescatter", [tensor], name, compression, op, process_set, factors)[0]
    return found


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduces and scatters a list of tensors, as ``reducescatter``."""
    factors = prescale_factor, postscale_factor
    return _scattered("grouped_reducescatter", tensors, name, compression, op, process_set, factors)
