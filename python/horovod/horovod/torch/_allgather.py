"""All-gather: the ranks first exchange the lengths of the first axes.

Thread rule: that of `mpi_ops`.
"""

from __future__ import annotations

from typing import Any

import torch

from horovod.common._calls import All, Call, Then, With
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch._allreduce import allreduce, grouped_allreduce
from horovod.torch._forms import Average, Tensors, checked, core, differentiable, of_gradient


def _row_counts(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([[tensor.shape[0] if tensor.dim() else 1 for tensor in tensors]])


def _gather_works(call: Call, tensors: list[torch.Tensor], rows: torch.Tensor) -> All:
    """Starts the second stage: one call, or one for each tensor if the lengths differ."""
    if bool((rows == rows[0]).all()):
        return All([core.all_gather(tensors, async_op=True, **call.options())])
    return All(
        [
            core.all_gather([tensor], counts=rows[:, i].tolist(), async_op=True, **call.options(f"_{i}" if i else ""))
            for i, tensor in enumerate(tensors)
        ]
    )


def _allgather(kind: str, x: Any, name: str | None, process_set: ProcessSet, rows: list[Any] | None = None) -> Any:
    """Gathers; appends the lengths of all ranks to ``rows``. ``rows`` is None: starts it."""
    grouped = kind == "grouped_allgather"
    tensors = checked(x, grouped=grouped)
    call = Call(kind, name, process_set)
    extents = call.options(": extents")

    def finished(results: list[list[torch.Tensor]]) -> Any:
        joined = [each for result in results for each in result]
        return joined if grouped else joined[0]

    def started() -> With:
        first = core.all_gather(_row_counts(tensors), async_op=True, **extents)
        return With(Then(first, lambda found: _gather_works(call, tensors, found)), finished)

    def run() -> Any:
        found = core.all_gather(_row_counts(tensors), **extents)
        assert rows is not None
        rows.append(found)
        if len(tensors) > 1:
            return finished(_gather_works(call, tensors, found).wait())
        is_even = bool((found == found[0]).all())
        return finished([core.all_gather(tensors, counts=None if is_even else found[:, 0].tolist(), **call.options())])

    return call.start(started) if rows is None else call.run(run)


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
    rows: list[torch.Tensor] = []
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
    rows: list[torch.Tensor] = []
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
    grads: list[torch.Tensor], rows: list[torch.Tensor], tensors: Tensors, process_set: ProcessSet
) -> list[torch.Tensor]:
    """This rank's rows of each gradient of a gathered tensor."""
    here = process_set.rank()
    begins = rows[0][:here].sum(0).tolist()
    counts = rows[0][here].tolist()
    return [
        grad.narrow(0, begin, count).reshape(tensor.shape)
        for grad, begin, count, tensor in zip(grads, begins, counts, tensors, strict=True)
    ]
