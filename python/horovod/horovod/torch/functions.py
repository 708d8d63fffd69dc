"""Broadcast of parameters, optimizer state and objects.

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    settings = hvd.broadcast_object(settings, root_rank=0)

All are collective. They raise HorovodInternalError where the ranks differ, and ValueError before ``init`` or for a
wrong argument. Objects are pickled by cloudpickle; unpickle only what you trust.

Thread rule: any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

import dl_comm.torch as core
from horovod.common import _job, _objects
from horovod.common.exceptions import translated
from horovod.common.process_sets import ProcessSet, global_process_set


def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | Iterable[torch.Tensor | tuple[str, torch.Tensor]], root_rank: int
) -> None:
    """Replaces tensors by those of one rank, in one call.

    Args:
        params: Names and tensors, such as ``model.state_dict()`` or ``model.named_parameters()``, or tensors. Entries
            that are no tensors are skipped.
        root_rank: The rank that has the values.
    """
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise ValueError(f"invalid params of type: {type(params).__name__}")
    listed = list(params.items()) if isinstance(params, Mapping) else list(params)
    named = [each if isinstance(each, tuple) else (f"parameter {i}", each) for i, each in enumerate(listed)]
    tensors = [(str(name), tensor) for name, tensor in named if isinstance(tensor, torch.Tensor)]
    with translated():
        core.broadcast_parameters(tensors, root_rank, group=_job.current().world)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Replaces an optimizer's state and options by those of one rank. Makes no step; takes every optimizer of torch.

    As after Horovod's, parameters without a gradient have one of zeros where the optimizer has no state yet.

    Args:
        optimizer: The optimizer, or a ``DistributedOptimizer``.
        root_rank: The rank that has the values.
        model: Not used.
    """
    world = _job.current().world
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not optimizer.state:
        for parameter in parameters:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    with translated():
        core.broadcast_optimizer_state(optimizer, root_rank, group=world)


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Returns the object of one rank.

    Args:
        obj: Any object that cloudpickle takes; used on the root only.
        root_rank: The rank that has it: of the job, also in a process set.
        name: Not used.
        process_set: The ranks.
    """
    return _objects.broadcast_object(obj, root_rank, process_set)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Returns the objects of all ranks, in their order.

    Args:
        obj: Any object that cloudpickle takes.
        name: Not used.
        process_set: The ranks.
    """
    return _objects.allgather_object(obj, process_set)
