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

import torch

import dl_comm.torch as core
from horovod.common import _job, _objects
from horovod.common._arguments import takes
from horovod.common.exceptions import translated


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


broadcast_object = takes("obj=None root_rank=0 name process_set")(_objects.broadcast_object)
allgather_object = takes("obj name process_set")(_objects.allgather_object)
