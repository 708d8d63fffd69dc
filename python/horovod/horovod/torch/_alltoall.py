"""All-to-all.

Thread rule: that of `mpi_ops`.
"""

from __future__ import annotations

from typing import Any

import torch

from horovod.common._calls import Call
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch._forms import checked, core, differentiable, of_gradient


def _send_counts(tensor: torch.Tensor, splits: Any, count: int) -> list[int]:
    """The rows for each rank. Raises ValueError if they do not fit the tensor."""
    if not tensor.dim():
        raise ValueError("alltoall takes tensors with at least one axis")
    length = tensor.shape[0]
    if splits is None:
        if length % count:
            raise ValueError(f"the first axis has {length} rows, no multiple of the {count} ranks: give splits")
        return [length // count] * count
    given = splits if isinstance(splits, torch.Tensor) else torch.as_tensor(splits)
    if given.is_floating_point() or given.dtype is torch.bool or given.dim() != 1 or len(given) != count:
        raise ValueError(f"splits is {splits} (expected {count} integers, one for each rank)")
    found: list[int] = given.tolist()
    if min(found) < 0 or sum(found) > length:
        raise ValueError(f"splits is {found}; the first axis has {length} rows")
    return found


def _alltoall(
    tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet, is_async: bool = False
) -> Any:
    (given,) = checked([tensor])
    call = Call("alltoall", name, process_set)
    try:
        sent = _send_counts(given, splits, call.group.size)
    except ValueError:
        call.end()
        raise
    rows = given if sum(sent) == given.shape[0] else given[: sum(sent)]
    device = splits.device if isinstance(splits, torch.Tensor) else "cpu"

    def result(found: tuple[torch.Tensor, list[int]]) -> Any:
        return found[0] if splits is None else (found[0], torch.tensor(found[1], dtype=torch.int32, device=device))

    options = {"send_counts": sent, "return_counts": True}
    return call.make(core.all_to_all, rows, is_async=is_async, result=result, **options)


def alltoall_async(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts ``alltoall``; returns a handle."""
    return int(_alltoall(tensor, splits, name, process_set, True))


def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends rows of a tensor to every rank, and returns those from every rank.

    The gradient goes back to where its rows came from.

    Args:
        tensor: Of the shape ``(n, *rest)``; ``n`` may differ between ranks.
        splits: How many rows each rank gets, in the order of the ranks: a tensor of integers, or a list; their sum is
            at most ``n``. None: as many each.
        name: What the ranks match.
        process_set: The ranks.

    Returns:
        The rows, in the order of the ranks that sent them. With ``splits`` also how many came from each: int32, on the
        device of ``splits``.
    """
    received: list[torch.Tensor] = []

    def run(x: list[torch.Tensor]) -> list[torch.Tensor]:
        wanted = _send_counts(x[0], splits, process_set.size() or 1)
        result, counts = _alltoall(x[0], wanted, name, process_set)
        received.append(counts)
        return [result]

    def gradient(grads: list[torch.Tensor]) -> list[torch.Tensor]:
        back, _ = alltoall(grads[0], splits=received[0], name=of_gradient(name), process_set=process_set)
        if back.shape[0] < tensor.shape[0]:  # rows that were not sent
            back = torch.cat([back, back.new_zeros((tensor.shape[0] - back.shape[0], *back.shape[1:]))])
        return [back]

    (result,) = differentiable(run, gradient, [tensor])
    return result if splits is None else (result, received[0])
