"""An allreduce of torch tensors through the levels of the communicator stack (`dl_comm.collective_span`).

Thread rule: any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dl_comm._arrays import groups
from dl_comm._arrays.arguments import operator_code
from dl_comm._base.errors import ArgumentError
from dl_comm._base.table import OPERATORS, SCALED, Allreduce, Broadcast, Reduce
from dl_comm._levels.hierarchy import Levels
from dl_comm.torch import _ops
from dl_comm.torch._arguments import HALVES, device_of, refuse_gradients, tensors_of
from dl_comm.torch._autograd import spread
from dl_comm.torch._compiler import constant

Step = tuple[int, tuple[int, int, int], str, float, float]
"""A collective of dl_comm.h with root 0, the place of its group, operator and factors."""

_ALLREDUCE, _BROADCAST, _REDUCE = Allreduce.code, Broadcast.code, Reduce.code
_NAMES = {code: name for codes in (OPERATORS, SCALED) for name, code in codes.items()}


def steps_of(tensors: list[torch.Tensor], op: str, prescale: float, postscale: float) -> tuple[Step, ...] | None:
    """Return the steps of an allreduce without a group if it goes through several levels.

    Raises:
        ArgumentError: The operation does not go through several levels.
    """
    integers = any(not (tensor.is_floating_point() or tensor.is_complex()) for tensor in tensors)
    found: tuple[Step, ...] | None = _steps(groups.route_changes, device_of(tensors), integers, op, prescale, postscale)
    return found


@constant
def _steps(
    changes: int, device: str, integers: bool, op: str, prescale: float, postscale: float
) -> tuple[Step, ...] | None:
    """Return plain values for the compiler, and `changes` is for it too."""
    levels = groups.given(None, _ALLREDUCE, device=device)
    if not isinstance(levels, Levels):
        return None
    operator, factors = operator_code(op, prescale, postscale)
    return tuple(
        (step.collective, (step.group.number, step.group.rank, step.group.size), _NAMES[step.operator], *step.factors)
        for step in levels.steps(operator, factors, integers)
    )


def allreduce_by_levels(
    steps: Sequence[Step], tensors: list[torch.Tensor], out: Any, op: str, name: str, timeout: float
) -> Any:
    """Run the steps; return new tensors, or `out`. Sums and means without `out` are differentiable."""
    differentiable = out is None and _ops.learns(tensors)

    def allreduce() -> list[torch.Tensor]:
        # The sums of the steps need the range of the sums within a call.
        results = [tensor.float() if tensor.dtype in HALVES else tensor for tensor in tensors]
        for step in steps:
            found = _run(step, results, name, timeout)
            if step[0] != _REDUCE or step[1][1] == 0:
                results = found
            elif differentiable:
                # A rank that is not the root gets empty tensors; they connect the graph.
                results = spread(found, [list(tensor.shape) for tensor in results], step[1], 0)
        return [result.to(tensor.dtype) for result, tensor in zip(results, tensors, strict=True)]

    if out is not None:
        refuse_gradients(tensors, "a call with out")
        given, _ = tensors_of(out, "out")
        if [(y.shape, y.dtype) for y in given] != [(x.shape, x.dtype) for x in tensors]:
            raise ArgumentError("out has other shapes or types than the tensors")
        with torch.no_grad():
            for result, value in zip(given, allreduce(), strict=True):
                result.copy_(value)
        return out
    if differentiable and op not in ("sum", "mean"):
        raise ArgumentError(f"allreduce with op={op!r} through several levels has no gradient; set it to 'flat'")
    return allreduce()


def _run(step: Step, tensors: list[torch.Tensor], name: str, timeout: float) -> list[torch.Tensor]:
    collective, place, op, before, after = step
    if collective == _BROADCAST:
        return list(_ops.call(_ops.ops.broadcast.default, tensors, *place, 0, name, timeout))
    if collective == _ALLREDUCE:
        return list(_ops.call(_ops.ops.allreduce.default, tensors, *place, op, before, after, name, timeout))
    return list(_ops.call(_ops.ops.reduce.default, tensors, *place, op, before, after, 0, name, timeout))
