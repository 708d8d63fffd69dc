"""An allreduce through the levels of the communicator stack (`dl_comm.collective_span`), from the innermost out.

Every binding runs the same steps, which are collectives on the groups of the levels, with its own calls.

Thread rule: as for a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from dl_comm import _dl_comm
from dl_comm._arrays.arguments import ADASUM, NO_FACTORS, is_half
from dl_comm._arrays.groups import Group
from dl_comm._base.errors import ArgumentError
from dl_comm._base.table import OPERATORS, SCALED, Allreduce, Broadcast, Reduce
from dl_comm._levels.communicators import Communicator

_ALLREDUCE, _BROADCAST, _REDUCE = Allreduce.code, Broadcast.code, Reduce.code
_SUM, _SCALED_SUM = OPERATORS["sum"], SCALED["sum"]
_MEANS = (OPERATORS["mean"], SCALED["mean"])


class Step(NamedTuple):
    """A collective of this rank, with root 0; the codes are those of dl_comm.h."""

    collective: int
    group: Group
    operator: int
    factors: tuple[float, float]


class Levels(Group):
    """A group whose allreduce goes through ``levels``, the innermost first."""

    def __init__(self, group: Group, levels: list[Communicator]) -> None:
        self._set(cast("_dl_comm.Group", _Handle(group.handle, self)), list(group.ranks), f"levels of {group!r}")
        self._steps: list[tuple[int, Group | None]] = []
        for index, level in enumerate(levels):
            if index == 0:
                self._steps.append((_ALLREDUCE if level.cartesian else _REDUCE, level.local))
            self._steps.append((_ALLREDUCE, level.cross))
            if not level.cartesian:
                self._steps.append((_BROADCAST, level.local))
        self._last = max(index for index, (collective, _) in enumerate(self._steps) if collective == _ALLREDUCE)

    def steps(self, operator: int, factors: tuple[float, float], integers: bool) -> list[Step]:
        """The steps of an allreduce in which this rank takes part. A mean is a sum that the last step divides.

        Args:
            operator: Of dl_comm.h.
            factors: Those of an operator with factors.
            integers: Whether a tensor has integers or bools.

        Raises:
            ArgumentError: The operation does not go through several levels.
        """
        if operator == ADASUM:
            raise ArgumentError("adasum does not go through several levels; set allreduce to 'flat'")
        if operator in _MEANS and integers:
            raise ArgumentError("a mean of integers does not go through several levels; set allreduce to 'flat'")
        before, after = factors
        if operator in _MEANS:
            operator, after = _SCALED_SUM, after / self.size
        plain = next((OPERATORS[name] for name, code in SCALED.items() if code == operator), operator)
        operators = [(plain, NO_FACTORS)] * len(self._steps)
        if plain != operator:
            operators[0] = (operator, (before, 1.0))
            operators[self._last] = (operator, (1.0, after))
        pairs = zip(self._steps, operators, strict=True)
        return [Step(collective, group, *each) for (collective, group), each in pairs if group is not None]


def run_steps(steps: Sequence[Step], values: list[Any], call: Callable[[Step, list[Any]], list[Any]]) -> list[Any]:
    """Runs the steps of an allreduce; ``call`` runs one on values and returns its results."""
    for step in steps:
        results = call(step, values)
        if step.collective != _REDUCE or step.group.rank == 0:
            values = results
    return values


class _Handle:
    """The handle of a group, with its own ``run``, for NumPy arrays."""

    def __init__(self, handle: _dl_comm.Group, levels: Levels) -> None:
        self._group_handle, self._levels = handle, levels

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group_handle, name)

    def run(self, spec: Any) -> None:
        """Runs an allreduce. The results are written at the end, so that an error changes nothing."""
        collective, operator, _, _, sources, results, _, _, name, timeout, factors, by_name = spec
        if collective != _ALLREDUCE:
            raise ArgumentError("only an allreduce goes through several levels")
        steps = self._levels.steps(operator, factors, any(source.dtype.kind in "iub" for source in sources))
        # The sums of the steps need the range of the sums within a call.
        given = [source.astype(np.float32) if is_half(source.dtype) else source for source in sources]
        here: list[Any] = [np.empty_like(source) for source in given]

        def call(step: Step, values: list[Any]) -> list[Any]:
            written = None if step.collective == _REDUCE and step.group.rank else here
            code = (step.collective, step.operator, 0, 1)
            step.group.handle.run((*code, values, written, None, None, name, timeout, step.factors, by_name))
            return here

        for result, value in zip(results, run_steps(steps, given, call), strict=True):
            np.copyto(result, value, casting="same_kind" if result.dtype.kind == "f" else "unsafe")

    def start(self, spec: Any) -> None:
        """Not supported: the selector chooses another implementation."""
        raise ArgumentError("an allreduce through several levels cannot be started; use async_op=False")
