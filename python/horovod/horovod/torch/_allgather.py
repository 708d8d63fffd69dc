"""All-gather.

Thread rule: that of `mpi_ops`.
"""

from __future__ import annotations

from typing import Any

import torch

from horovod.common._calls import Call
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch._allreduce import allreduce, grouped_allreduce
from horovod.torch._forms import Average, Tensors, checked, core, differentiable, of_gradient


def _allgather(
    kind: str, x: Any, name: str | None, process_set: ProcessSet, rows: list[list[int]] | None = None
) -> Any:
    """Gathers; appends the rows of each rank, for each tensor, to ``rows``. ``rows`` is None: starts it."""
    grouped = kind == "grouped_allgather"
    tensors = checked(x, grouped=grouped)

    def result(found: tuple[Any, Any]) -> Any:
        if rows is not None:
            rows.extend(found[1] if grouped else [found[1]])
        return found[0]

    given, options = tensors if grouped else tensors[0], {"ragged": True, "return_counts": True}
    call = Call(kind, name, process_set)
    return call.make(core.all_gather, given, is_async=rows is None, result=result, **options)


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Starts ``allgather``; returns a handle."""
    return int(_allgather("allgather", tensor, name, process_set))


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts ``grouped_allgather``; returns a handle."""
    return int(_allgather("grouped_allgather", tensors, name, process_set))


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
    rows: list[list[int]] = []
    found: torch.Tensor = differentiable(
        lambda x: _allgather("allgather", x, name, process_set, rows),
        lambda grads: _own_rows(
            [allreduce(grads[0], op=Average, name=of_gradient(name), process_set=process_set)],
            rows,
            [tensor],
            process_set,
        ),
        [tensor],
    )
    return found


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Gathers a list of tensors, as ``allgather``."""
    rows: list[list[int]] = []
    found = differentiable(
        lambda *x: tuple(_allgather("grouped_allgather", x, name, process_set, rows)),
        lambda grads: _own_rows(
            grouped_allreduce(grads, op=Average, name=of_gradient(name), process_set=process_set),
            rows,
            tensors,
            process_set,
        ),
        tensors,
    )
    return list(found)


def _own_rows(
    grads: list[torch.Tensor], rows: list[list[int]], tensors: Tensors, process_set: ProcessSet
) -> list[torch.Tensor]:
    """This rank's rows of each gradient of a gathered tensor."""
    here = process_set.rank() or 0
    return [
        grad.narrow(0, sum(counts[:here]), counts[here]).reshape(tensor.shape)
        for grad, counts, tensor in zip(grads, rows, tensors, strict=True)
    ]
