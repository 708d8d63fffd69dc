"""Splits gradients into buckets, which are averaged while backward runs, for all frameworks.

Thread rule: pure functions.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from dl_comm._base.errors import ArgumentError

# The first bucket is small, so that the first call starts early.
FIRST_BUCKET_BYTES = 1 << 20
_VARIABLE = "DL_COMM_BUCKET_MB"
_Item = TypeVar("_Item")


def bucket_bytes(bucket_mb: float | None = None) -> int | None:
    """Return the bucket size in bytes from the argument (MiB) or the environment; None if neither is set.

    Raises `dl_comm.ArgumentError` when it is not a positive number.
    """
    name: str = "bucket_mb"
    given: Any = bucket_mb
    if bucket_mb is None:
        name, given = _VARIABLE, os.environ.get(_VARIABLE, "").strip()
        if not given:
            return None
    try:
        size = float(given)
    except (TypeError, ValueError):
        size = math.nan
    if not 0 < size < math.inf:
        raise ArgumentError(f"invalid {name}: '{given}' (the size of a bucket in MiB must be positive)")
    return int(size * 2**20)


def split(items: Iterable[_Item], size: Callable[[_Item], int], limit: int) -> Iterator[list[_Item]]:
    """Split a list into buckets of at least `limit` bytes, the last one less; the first is full at 1 MiB."""
    part: list[_Item] = []
    filled, bound = 0, min(FIRST_BUCKET_BYTES, limit)
    for item in items:
        part.append(item)
        filled += size(item)
        if filled >= bound:
            yield part
            part, filled, bound = [], 0, limit
    if part:
        yield part
