"""Every element type of torch moves wherever data only moves: on 1, 2 and 3 ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dl_comm  # noqa: E402
import dl_comm.torch as cdl  # noqa: E402

NAMES = "int16 uint16 uint32 uint64 complex32 complex64 complex128 float8_e4m3fn float8_e5m2 bool bfloat16 float64"
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def values(name: str, rank: int) -> torch.Tensor:
    """Four values that depend on the rank, except those of bool."""
    return torch.tensor([rank + 1.0] * 4).to(getattr(torch, name))


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    assert torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


BROADCASTS: dict[str, Callable[..., Any]] = {
    "in place": lambda x, root, group: cdl.broadcast([x], root)[0],
    "by the package": lambda x, root, group: dl_comm.broadcast([x], root)[0],
    "of a group": lambda x, root, group: cdl.broadcast([x], root, group=group)[0],
    "new": lambda x, root, group: cdl.broadcast([x], root, in_place=False)[0],
    "started": lambda x, root, group: cdl.broadcast([x], root, async_op=True).wait()[0],
}


@pytest.mark.parametrize("name", NAMES.split())
def test_moves(name: str, rank: int, size: int) -> None:
    root = size - 1
    mine, all_values = values(name, rank), torch.cat([values(name, each) for each in range(size)])
    with dl_comm.Group() as group:
        for how, broadcast in BROADCASTS.items():
            x = values(name, rank)
            found = broadcast(x, root, group)
            assert_same(found, values(name, root))
            assert_same(x, values(name, rank if how == "new" else root))
    assert_same(cdl.all_gather(mine), all_values)
    out = torch.zeros(4 * size, dtype=mine.dtype)
    assert cdl.all_gather(mine, out=out) is out
    assert_same(out, all_values)
    assert_same(cdl.all_gather(mine, async_op=True).wait(), all_values)
    gathered = cdl.gather(mine, root)
    assert (gathered is None) == (rank != root)
    if gathered is not None:
        assert_same(gathered, all_values)
    assert_same(cdl.scatter(all_values if rank == root else torch.zeros_like(all_values), root), mine)
    blocks = torch.cat([values(name, rank)] * size)
    assert_same(cdl.all_to_all(blocks), all_values)
    received = torch.zeros_like(mine)
    cdl.sendrecv(mine, (rank + 1) % size, received, (rank - 1) % size)
    assert_same(received, values(name, (rank - 1) % size))


def test_types_that_differ(rank: int, size: int) -> None:
    """The core does not know these types, and compares them nevertheless."""
    if size == 1:
        pytest.skip("needs two ranks")
    x = torch.zeros(4, dtype=torch.float8_e4m3fn if rank else torch.float8_e5m2)
    for call in (lambda: cdl.broadcast([x]), lambda: cdl.all_gather(x)):
        with pytest.raises(dl_comm.MismatchError, match="float8_e5m2"):
            call()
