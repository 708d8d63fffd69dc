"""Sums and averages of sparse tensors.

Thread rule: that of `mpi_ops`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from horovod.common._calls import synchronize
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch._allgather import allgather_async
from horovod.torch._forms import Average, Sum


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Starts the sum or average of sparse tensors, by two all-gathers: of the indices and of the values.

    Args:
        tensor: A sparse tensor in the COO layout, of the same shape and type on all ranks.
        name: What the ranks match.
        op: ``Sum`` or ``Average``.
        process_set: The ranks.

    Returns:
        A function that waits for the result and returns it: a sparse tensor, not coalesced.
    """
    if op not in (Average, Sum):
        raise NotImplementedError("sparse tensors have sums and averages only")
    places = tensor._indices().transpose(0, 1).contiguous()
    indices = allgather_async(places, f"{name}.indices", process_set)
    values = allgather_async(tensor._values().contiguous(), f"{name}.values", process_set)

    def result() -> torch.Tensor:
        found = synchronize(values)
        if op == Average:
            found = found / process_set.size()
        joined: torch.Tensor = torch.sparse_coo_tensor(
            synchronize(indices).transpose(0, 1), found, tensor.size(), dtype=tensor.dtype, check_invariants=False
        )
        return joined

    return result
