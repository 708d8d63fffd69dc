"""TorchMPI's functions for networks, for torch modules.

    from dl_comm.compat.torchmpi import nn as mpinn

    mpinn.synchronizeParameters(net)  # rank 0's
    loss.backward()
    mpinn.synchronizeGradients(net)  # sums: divide by size, or scale the learning rate

New programs use `dl_comm.torch.DistributedOptimizer`, which averages. `async_` is TorchMPI's `async`, a word of Python.

Thread rule: one thread at a time.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

import dl_comm
from dl_comm import ArgumentError, Work

if TYPE_CHECKING:
    import torch

__all__ = ["async_", "checkWithAllreduce", "synchronizeGradients", "synchronizeParameters"]

_TOLERANCE = 1e-7


def synchronizeParameters(net: torch.nn.Module, withAllreduce: bool = False) -> None:
    """All ranks get the parameters of rank 0, or the means of all. Collective."""
    parameters = [each.detach() for each in net.parameters()]
    if withAllreduce:
        dl_comm.allreduce(parameters, "mean", out=parameters)
    else:
        dl_comm.broadcast(parameters, 0, in_place=True)


def synchronizeGradients(net: torch.nn.Module) -> None:
    """All ranks get the sums of the gradients. Collective. The same parameters have gradients on all ranks."""
    gradients = [each.grad for each in net.parameters() if each.grad is not None]
    dl_comm.allreduce(gradients, "sum", out=gradients)


def checkWithAllreduce(net: torch.nn.Module) -> None:
    """Checks that mean and variance of the absolute values of each parameter are those of all ranks. Collective.

    Raises:
        ArgumentError: They differ by more than 1e-7 of them; on all ranks. It names the parameter.
    """
    names, own = [], []
    for name, each in net.named_parameters():
        values = each.detach().double().abs()
        names.append(name)
        own.append([values.mean().item(), values.var(unbiased=False).item()])
    table = np.array(own)
    low, high = dl_comm.allreduce(table, "min"), dl_comm.allreduce(table, "max")
    for name, smallest, largest in zip(names, low, high, strict=True):
        for what, one, other in zip(("mean", "variance"), smallest, largest, strict=True):
            if not math.isclose(one, other, rel_tol=_TOLERANCE):
                raise ArgumentError(f"{name}: the {what} of the absolute values is {one} on a rank, {other} on another")


class Asynchronous:
    """Sums of gradients that start during backward: TorchMPI's `torchmpi.nn.async`."""

    def __init__(self) -> None:
        self._hooks: dict[int, tuple[Any, list[Any]]] = {}
        self._started: list[tuple[Any, Work[Any]]] = []

    def registerAsyncMPIBackward(self, net: torch.nn.Module, syncGradientFrequency: int = 1) -> None:
        """Starts a sum of each gradient as soon as backward has made it, in each `syncGradientFrequency`-th pass.

        Raises:
            ArgumentError: The network is registered already, or the frequency is below 1.
        """
        if id(net) in self._hooks:
            raise ArgumentError("the network is registered already: unregisterAsyncMPIBackward first")
        if syncGradientFrequency < 1:
            raise ArgumentError(f"syncGradientFrequency is {syncGradientFrequency}; it is at least 1")

        def hook(name: str, passes: list[int]) -> Any:
            def start(parameter: Any) -> None:
                passes[0] += 1
                if passes[0] % syncGradientFrequency == 0:
                    gradient: Any = parameter.grad
                    work = dl_comm.allreduce(
                        gradient, "sum", out=gradient, name=f"gradient of {name}", by_name=True, async_op=True
                    )
                    self._started.append((net, work))

            return start

        parameters: list[tuple[str, Any]] = [each for each in net.named_parameters() if each[1].requires_grad]
        handles = [each.register_post_accumulate_grad_hook(hook(name, [0])) for name, each in parameters]
        self._hooks[id(net)] = net, handles

    def unregisterAsyncMPIBackward(self, net: torch.nn.Module) -> None:
        """Ends what `registerAsyncMPIBackward` has begun; nothing if it has not."""
        self.synchronizeGradients(net)
        for handle in self._hooks.pop(id(net), (net, []))[1]:
            handle.remove()

    def synchronizeGradients(self, net: torch.nn.Module) -> None:
        """Waits for the sums of the last backward pass: call it before the gradients are used."""
        mine = [work for of, work in self._started if of is net]
        self._started = [(of, work) for of, work in self._started if of is not net]
        for work in mine:
            work.wait()


async_ = Asynchronous()
"""Sums of gradients that start during backward."""


def __dir__() -> list[str]:
    return sorted(__all__)
