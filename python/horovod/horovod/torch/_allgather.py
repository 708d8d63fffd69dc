"""All-gather.

Thread rule: that of `mpi_ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from horovod.common._calls import Call
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch._allreduce import grouped_allreduce
from horovod.torch._forms import Average, Tensors, checked, core, differentiable, first, of_gradient


def _allgather(
    kind: str,
    x: Iterable[Any],
    name: str | None,
    process_set: ProcessSet,
    result: Callable[[Any], Any],
    is_async: bool = False,
) -> Any:
    """Gathers tensors, or starts it; ``result`` makes the result from those of the core and the rows of each rank."""
    given, options = checked(x), {"ragged": True, "return_counts": True}
    return Call(kind, name, process_set).make(core.all_gather, given, is_async=is_async, result=result, **options)


def gathered(kind: str, tensors: Tensors, name: str | None, process_set: ProcessSet) -> list[Any]:
    """Gathers tensors, with gradients."""
    rows: list[list[int]] = []

    def result(found: tuple[list[torch.Tensor], list[list[int]]]) -> list[torch.Tensor]:
        rows.extend(found[1])
        return found[0]

    def gradient(grads: list[torch.Tensor]) -> list[torch.Tensor]:
        means = grouped_allreduce(grads, op=Average, name=of_gradient(name), process_set=process_set)
        here = process_set.rank() or 0
        return [
            mean.narrow(0, sum(counts[:here]), counts[here]).reshape(tensor.shape)
            for mean, counts, tensor in zip(means, rows, tensors, strict=True)
        ]

    return differentiable(lambda x: _allgather(kind, x, name, process_set, result), gradient, tensors)


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Starts ``allgather``; returns a handle."""
    return int(_allgather("allgather", [tensor], name, process_set, lambda found: found[0][0], True))


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts ``grouped_allgather``; returns a handle."""
    return int(_allgather("grouped_allgather", tensors, name, process_set, first, True))


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Returns the tensors of all ranks, joined along the first axis in the order of the ranks.

    The gradient is this rank's rows of the *average* of the ranks' gradients.

    Args:
        tensor: Of the shape ``(n, *rest)``; ``n`` may differ between ranks.
        name: What the ranks match.
        process_set: The ranks.

    Returns:
        A new tensor of the shape ``(sum of n, *rest)``.
    """
    found: torch.Tensor = gathered("allgather", [tensor], name, process_set)[0]
    return found


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Gathers a list of tensors, as ``allgather``."""
    return gathered("grouped_allgather", tensors, name, process_set)
