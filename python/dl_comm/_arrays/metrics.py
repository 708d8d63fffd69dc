"""The mean of a dict of metrics over the ranks, and flags that one rank raises for all.

Thread rule: collective: all ranks call it in the same order. Any thread may call it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dl_comm import _dl_comm
from dl_comm._arrays.agreement import failing_together
from dl_comm._arrays.groups import CONTROL_TEAM, Group, averaging_team, unless_world
from dl_comm._base.checks import checked_flag, checked_float
from dl_comm._base.errors import ArgumentError, DTypeError


def average_metrics(metrics: Mapping[str, Any], weight: float = 1.0, *, group: Group | None = None) -> dict[str, float]:
    """The means of named numbers over the ranks, in one call. Collective.

    Args:
        metrics: Names and numbers: Python or NumPy numbers, or tensors with one element of any framework. The same
            names on all ranks, in any order. The mean is computed in float64, so counts are not rounded; NaN stays NaN.
        weight: The weight of this rank, for example its number of samples. The numbers of a rank of weight 0 are
            ignored.
        group: The ranks that take part; None: all.

    Returns:
        The names, in the order of ``metrics``, with their means as floats: sum(weight * number) / sum(weight).

    Raises:
        ArgumentError: ``weight`` is negative or not finite, or it is 0 on all ranks; or a value is masked.
        DTypeError: ``metrics`` is not a mapping, a name is not a string, or a value is not a number.
        MismatchError: The ranks passed different names; the message lists them.
        StateError: ``init`` was not called, or ``finalize`` was.
    """
    group = unless_world(group)
    team = averaging_team(group, CONTROL_TEAM)
    with failing_together("average_metrics", group):
        numbers, weight = _checked(metrics, weight)
    names = sorted(numbers)
    # A rank without samples often has NaN metrics, and 0 * NaN is NaN.
    products = [weight * numbers[name] if weight else 0.0 for name in names]
    means = np.array([*products, weight], np.float64)
    # The names are part of the call's name, which the ranks must agree on.
    _dl_comm.average([means], [means], team, f"average_metrics({', '.join(map(repr, names))})")
    if means[-1] == 0:
        raise ArgumentError("the weight is 0 on all ranks; at least one must be positive")
    by_name = dict(zip(names, (means[:-1] / means[-1]).tolist(), strict=True))
    return {name: by_name[name] for name in metrics}


def any_rank(flag: Any, *, group: Group | None = None) -> bool:
    """Whether ``flag`` is true on any rank: for decisions that all ranks must make together. Collective.

        if dl_comm.any_rank(loss > limit):  # also on the ranks whose own loss is small
            break

    Ranks that have called ``join`` count as false.

    Args:
        flag: True or False, or an array or tensor with one element. ``not any_rank(not flag)``: whether all are true.
        group: The ranks that take part; None: all.

    Returns:
        The same on every rank.

    Raises:
        ArgumentError: ``flag`` is neither true nor false.
        DTypeError: An array has more than one element.
        MismatchError: The ranks issued different collectives, or a rank raised one of these.
        StateError: ``init`` was not called, or ``finalize`` was.
    """
    group = unless_world(group)
    team = averaging_team(group, CONTROL_TEAM)
    with failing_together("any_rank", group):
        share = np.array([float(_truth(flag))])
    _dl_comm.average([share], [share], team, "any_rank")
    return bool(share[0] > 0)


def _truth(flag: Any) -> bool:
    return _number("flag", flag) != 0 if hasattr(flag, "shape") else checked_flag("flag", flag)


def _checked(metrics: Any, weight: Any) -> tuple[dict[str, float], float]:
    if not isinstance(metrics, Mapping):
        raise DTypeError(f"average_metrics takes a dict of names and numbers, not a {type(metrics).__name__}")
    number = checked_float("weight", weight)
    if not (number >= 0 and math.isfinite(number)):
        raise ArgumentError(f"invalid weight: {weight!r} (expected a finite number >= 0)")
    return {name: _number(name, value) for name, value in metrics.items()}, number


def _number(name: Any, value: Any) -> float:
    if not isinstance(name, str):
        raise DTypeError(f"the name of a metric must be a string, not a {type(name).__name__}")
    if isinstance(value, np.ma.MaskedArray):
        raise ArgumentError(f"metric {name!r} is masked; pass a number, for example value.filled(0)")
    try:
        # item() and numpy() also convert bfloat16, and torch tensors that require gradients; np.asarray does not.
        for method in ("item", "numpy"):
            if hasattr(value, method):
                value = getattr(value, method)()
                break
        array = np.asarray(value)
        if array.size == 1 and not isinstance(array.flat[0], (str, bytes)) and not np.iscomplexobj(array):
            return float(array.flat[0])
        reason = ""
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        reason = f": {error}"
    raise DTypeError(f"metric {name!r} is not a number but a {type(value).__name__}{reason}")
