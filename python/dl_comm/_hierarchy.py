"""An allreduce through the levels of the communicator stack (`dl_comm.collective_span`), from the innermost out.

Thread rule: as for a group.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from dl_comm import _dl_comm
from dl_comm._communicators import Communicator
from dl_comm._errors import ArgumentError
from dl_comm._groups import Group

# The codes of dl_comm.h.
_ALLREDUCE, _BROADCAST, _REDUCE = 1, 2, 4
_SUM, _MEAN, _SCALED, _ADASUM = 0, 1, 8, 9


def hierarchical(group: Group, levels: list[Communicator]) -> Group:
    """``group`` with an allreduce through ``levels``, the innermost first."""
    result = Group.__new__(Group)
    result._set(cast("_dl_comm.Group", _Handle(group, levels)), list(group.ranks), f"levels of {group!r}")
    return result


def is_half(dtype: np.dtype[Any]) -> bool:
    """Whether it is float16 or bfloat16."""
    return dtype.itemsize == 2 and (dtype.kind == "f" or dtype.name == "bfloat16")


class _Handle:
    """The handle of a group, with its own ``run``."""

    def __init__(self, group: Group, levels: list[Communicator]) -> None:
        self._group = group
        # The collectives of this rank; without a group it takes no part.
        self._steps: list[tuple[int, Group | None]] = []
        for index, level in enumerate(levels):
            if index == 0:
                self._steps.append((_ALLREDUCE if level.cartesian else _REDUCE, level.local))
            self._steps.append((_ALLREDUCE, level.cross))
            if not level.cartesian:
                self._steps.append((_BROADCAST, level.local))
        self._last = max(index for index, (collective, _) in enumerate(self._steps) if collective == _ALLREDUCE)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group.handle, name)

    def run(self, spec: Any) -> None:
        """Runs an allreduce. The results are written at the end, so that an error changes nothing."""
        collective, operator, _, _, sources, results, _, _, name, timeout, factors = spec
        if collective != _ALLREDUCE:
            raise ArgumentError("only an allreduce goes through several levels")
        operators = self._operators(operator, factors, sources)
        # The sums of the steps need the range of the sums within a call.
        given = [source.astype(np.float32) if is_half(source.dtype) else source for source in sources]
        here: list[Any] = [np.empty_like(source) for source in given]
        for (step, group), (code, scale) in zip(self._steps, operators, strict=True):
            if group is not None:
                written = None if step == _REDUCE and group.rank else here
                read = given if step != _BROADCAST or group.rank == 0 else here
                group.handle.run((step, code, 0, 1, read, written, None, None, name, timeout, scale))
            given = here
        for result, value in zip(results, here, strict=True):
            np.copyto(result, value, casting="same_kind" if result.dtype.kind == "f" else "unsafe")

    def start(self, spec: Any) -> None:
        """Not supported: the selector chooses another implementation."""
        raise ArgumentError("an allreduce through several levels cannot be started; use async_op=False")

    def _operators(
        self, operator: int, factors: tuple[float, float], sources: list[Any]
    ) -> list[tuple[int, tuple[float, float]]]:
        """The operator and factors of each step. A mean is a sum that the last step divides."""
        if operator == _ADASUM:
            raise ArgumentError("adasum does not go through several levels; set allreduce to 'flat'")
        plain = (operator, (1.0, 1.0))
        if operator not in (_MEAN, _SCALED):
            return [plain] * len(self._steps)
        if operator == _MEAN and any(source.dtype.kind in "iub" for source in sources):
            raise ArgumentError("a mean of integers does not go through several levels; set allreduce to 'flat'")
        before, after = factors if operator == _SCALED else (1.0, 1.0 / self._group.size)
        steps = [(_SUM, (1.0, 1.0))] * len(self._steps)
        steps[0] = (_SCALED, (before, 1.0))
        steps[self._last] = (_SCALED, (1.0, after))
        return steps
