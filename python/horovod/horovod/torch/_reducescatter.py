"""Reduce-scatter: the first ranks get one row more.

Thread rule: that of `mpi_ops`.
"""

from __future__ import annotations

from typing import Any

import torch

from horovod.common._calls import All, Call, With
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch._allgather import allgather, grouped_allgather
from horovod.torch._forms import (
    Average,
    Factors,
    Sum,
    Tensors,
    checked,
    core,
    differentiable,
    of_gradient,
    reduction,
)
from horovod.torch.compression import Compression


def _scattered(call: Call, options: dict[str, Any], tensors: list[torch.Tensor], async_op: bool) -> list[Any]:
    """Makes or starts one call, or one for each tensor if the rows are no multiple of the ranks.

    The first has the plain name in both cases, so that ranks that differ notice it at once.
    """
    count = call.group.size
    if all(tensor.shape[0] % count == 0 for tensor in tensors):
        return [core.reduce_scatter(tensors, async_op=async_op, **options, **call.options())]
    made = []
    for i, tensor in enumerate(tensors):
        least, more = divmod(tensor.shape[0], count)
        counted = {"counts": [least + (place < more) for place in range(count)], **call.options(f"_{i}" if i else "")}
        made.append(core.reduce_scatter([tensor], async_op=async_op, **options, **counted))
    return made


def _reducescatter(
    kind: str,
    x: Any,
    name: str | None,
    op: int,
    process_set: ProcessSet,
    factors: Factors,
    is_async: bool = False,
) -> Any:
    grouped = kind == "grouped_reducescatter"
    tensors = checked(x, grouped=grouped)
    if op not in (Average, Sum):
        raise NotImplementedError("reducescatter has the operators hvd.Average and hvd.Sum only")
    if not all(tensor.dim() for tensor in tensors):
        raise RuntimeError("reducescatter takes tensors with at least one axis")
    call, options = Call(kind, name, process_set), reduction(op, factors)

    def finished(results: list[list[torch.Tensor]]) -> Any:
        blocks = [each for result in results for each in result]
        return blocks if grouped else blocks[0]

    if is_async:
        return call.start(lambda: With(All(_scattered(call, options, tensors, True)), finished))
    return call.run(lambda: finished(_scattered(call, options, tensors, False)))


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
    return int(_reducescatter("reducescatter", tensor, name, op, process_set, factors, True))


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
    return int(_reducescatter("grouped_reducescatter", tensors, name, op, process_set, factors, True))


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
    small, context = compression.compress(tensor)
    factors = prescale_factor, postscale_factor
    result = differentiable(
        lambda x: _reducescatter("reducescatter", x, name, op, process_set, factors),
        lambda grads: [
            allgather(grads[0] * _factor_of_gradient(op, factors, process_set), of_gradient(name), process_set)
        ],
        [small],
    )
    found: torch.Tensor = compression.decompress(result, context)
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
    small = [compression.compress(tensor) for tensor in tensors]
    factors = prescale_factor, postscale_factor
    results = differentiable(
        lambda *x: tuple(_reducescatter("grouped_reducescatter", x, name, op, process_set, factors)),
        lambda grads: grouped_allgather(
            [grad * _factor_of_gradient(op, factors, process_set) for grad in grads], of_gradient(name), process_set
        ),
        [tensor for tensor, _ in small],
    )
    return [compression.decompress(result, context) for result, (_, context) in zip(results, small, strict=True)]


def _factor_of_gradient(op: int, factors: Factors, process_set: ProcessSet) -> float:
    return (process_set.size() or 1 if op == Sum else 1) * factors[0] * factors[1]
