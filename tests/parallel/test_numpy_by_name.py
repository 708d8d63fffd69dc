"""Calls that match by their names, wherever the ranks make them, through the handle that the collectives use."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import dl_comm as mc

ALLREDUCE, BROADCAST = 1, 2
SUM, MAX = 0, 3


def spec(
    x: np.ndarray[Any, Any], name: str, *, collective: int = ALLREDUCE, op: int = SUM, timeout: float = 0.0
) -> tuple[Any, ...]:
    return (collective, op, 0, 1, [x], [x], None, None, name, timeout, (1.0, 1.0), True)


def test_ranks_make_the_calls_in_contrary_orders(rank: int, size: int) -> None:
    handle = mc.world().handle
    for shape in ((3,), (200, 100)):
        data = [np.full(shape, rank + number, np.float32) for number in range(60)]
        order = range(60) if rank == 0 else range(59, -1, -1)
        if rank == 0:
            works = [handle.start(spec(data[number], f"tensor {number}")) for number in order]
            for work in reversed(works):
                work.wait(0.0)
        else:
            for number in order:
                handle.run(spec(data[number], f"tensor {number}"))
        for number, x in enumerate(data):
            np.testing.assert_array_equal(x, sum(other + number for other in range(size)))


def test_a_conflict_fails_one_name_on_every_rank(rank: int, size: int) -> None:
    handle, since = mc.world().handle, time.monotonic()
    data = [np.ones(10) for _ in range(20)]
    works = [handle.start(spec(x, f"tensor {number}")) for number, x in enumerate(data)]
    if size > 1:
        differs: list[dict[str, int]] = [{"op": MAX}, {"collective": BROADCAST}, {}]
        for number, other in enumerate(differs):
            x = np.ones(3 + (rank if not other else 0), np.float32)
            with pytest.raises(mc.MismatchError, match=f"'odd {number}' by name"):
                handle.run(spec(x, f"odd {number}", **(other if rank else {})))
            assert set(x) == {1}
    for work in works:
        work.wait(0.0)
    assert all(set(x) == {size} for x in data)
    assert time.monotonic() - since < 10


def test_a_call_that_only_one_rank_makes_ends_at_its_deadline(rank: int, size: int) -> None:
    handle, lonely = mc.world().handle, np.ones(5)
    if size > 1 and rank == 0:
        started = handle.start(spec(lonely, "lonely", timeout=0.3))
    for number in range(10):
        x = np.ones(5)
        handle.run(spec(x, f"tensor {number % 2}"))
        assert set(x) == {size}
        time.sleep(0.1)
    if size > 1 and rank == 0:
        with pytest.raises(mc.MismatchError, match="'lonely' by name"):
            started.wait(1.0)
        assert set(lonely) == {1}
    assert mc.allreduce(1.0) == size


def test_it_needs_a_name(size: int) -> None:
    with pytest.raises(mc.ArgumentError, match="needs a name"):
        mc.world().handle.run(spec(np.ones(size), ""))
