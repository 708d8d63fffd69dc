"""Failures of one rank that all ranks learn of.

A collective function may fail on one rank before it has made its call: an argument is invalid, or a value is no number.
If that rank just raised, its next call could match the call in which the others still wait.

Thread rule: as collective functions: the ranks make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np

from dl_comm import _dl_comm
from dl_comm._arrays.collectives import allreduce
from dl_comm._arrays.groups import CONTROL_TEAM, Group
from dl_comm._base.errors import CommError


@contextmanager
def failing_together(what: str, group: Group | None = None) -> Iterator[None]:
    """If this block raises, the call that the other ranks make raises MismatchError with the text of the exception.

    The block must not contain collective calls. Without an exception nothing is sent. ``group``: that of the call;
    None: the call is one of metrics or a broadcast, on all ranks.
    """
    try:
        yield
    except Exception as error:
        text = f"{what} failed on this rank: {type(error).__name__}: {error}"
        nothing = np.zeros(1)
        # Only a rank that fails in the same way makes the same call. Without a started job there is none to tell.
        with suppress(CommError):
            if group is None:
                _dl_comm.average([nothing], [nothing], CONTROL_TEAM, text)
            else:
                allreduce(nothing, group=group, name=text)
        raise
