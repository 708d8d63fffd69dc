"""The optimizer of ``op=Adasum``: it makes its step on this rank, and reduces the changes of the parameters.

Thread rule: as torch optimizers, one thread at a time.
"""

from __future__ import annotations

from typing import Any

import torch

from horovod.torch.mpi_ops import Adasum, grouped_allreduce_

_ATTRIBUTE = "_horovod_delta"


class _State:
    """What the delta optimizer keeps: the values before a step."""

    def __init__(self, compression: Any) -> None:
        self.compression = compression
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []


class Delta(torch.optim.Optimizer):
    """The methods of a ``DistributedOptimizer`` with ``op=Adasum``: it reduces the changes of the parameters."""

    def synchronize(self) -> None:
        """Does nothing: gradients stay those of the rank."""

    def skip_synchronize(self) -> Any:
        """Raises AssertionError: every step is collective."""
        raise AssertionError("an optimizer with op=hvd.Adasum has no step without communication")

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Does nothing: gradients add up until ``step()``."""


def _before_delta(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    state: _State = optimizer.__dict__[_ATTRIBUTE]
    state.before = [(each, each.detach().clone()) for group in optimizer.param_groups for each in group["params"]]


@torch.no_grad()
def _after_delta(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    state: _State = optimizer.__dict__[_ATTRIBUTE]
    pairs, state.before = state.before, []
    small = [state.compression.compress((after - before).contiguous()) for after, before in pairs]
    grouped_allreduce_([tensor for tensor, _ in small], op=Adasum, name="adasum")
    for (after, before), (tensor, context) in zip(pairs, small, strict=True):
        after.copy_(before + state.compression.decompress(tensor, context))


def make_delta(optimizer: torch.optim.Optimizer, compression: Any) -> None:
    """Gives an optimizer what its steps need."""
    optimizer.__dict__[_ATTRIBUTE] = _State(compression)
    optimizer.register_step_pre_hook(_before_delta)
    optimizer.register_step_post_hook(_after_delta)
