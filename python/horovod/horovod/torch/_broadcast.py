"""Broadcast.

Thread rule: that of `mpi_ops`.
"""

from __future__ import annotations

from typing import Any

import torch

from horovod.common import _job
from horovod.common._calls import Call
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch._allreduce import allreduce
from horovod.torch._forms import Average, checked, core, differentiable, of_gradient


def _broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    in_place: bool,
    is_async: bool = False,
) -> Any:
    (given,) = checked([tensor])
    call = Call("broadcast", name, process_set)
    ranks = process_set.ranks or []
    if root_rank not in ranks:
        call.end()
        raise ValueError(f"root_rank is {root_rank}, which is not in the process set of the ranks {ranks}")
    root = ranks.index(root_rank)
    target = given if in_place else given.clone()
    result = tensor if in_place else target
    return call.make(core.broadcast if is_async else _now, target, root, is_async=is_async, result=lambda _: result)


def _now(tensor: torch.Tensor, root: int, **options: Any) -> None:
    # The core's blocking broadcast is not the call that others may have started.
    core.broadcast(tensor, root, async_op=True, **options).wait()


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts ``broadcast``; returns a handle."""
    return int(_broadcast(tensor, root_rank, name, process_set, False, True))


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Returns the tensor of one rank.

    The gradient on the root is the *average* of the ranks' gradients, and zero on the others.

    Args:
        tensor: Of the same shape and type on all ranks.
        root_rank: The rank that has the values: of the job, also in a process set.
        name: What the ranks match.
        process_set: The ranks.

    Returns:
        A new tensor.
    """

    def gradient(grads: list[torch.Tensor]) -> list[torch.Tensor]:
        mean = allreduce(grads[0], op=Average, name=of_gradient(name), process_set=process_set)
        return [mean if _job.current().rank == root_rank else torch.zeros_like(mean)]

    def run(x: list[torch.Tensor]) -> list[torch.Tensor]:
        return [_broadcast(x[0], root_rank, name, process_set, False)]

    found: torch.Tensor = differentiable(run, gradient, [tensor])[0]
    return found


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts ``broadcast_``; returns a handle."""
    return int(_broadcast(tensor, root_rank, name, process_set, True, True))


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Replaces a tensor by that of one rank, as ``broadcast``; returns it. Not differentiable."""
    found: torch.Tensor = _broadcast(tensor, root_rank, name, process_set, True)
    return found
