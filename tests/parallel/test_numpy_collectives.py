"""Every collective on NumPy arrays, numbers and objects, on 1, 2, 3 ranks: values, groups, handles, bad input."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dl_comm as mc

FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
INTEGERS = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]
COMPLEX = [np.complex64, np.complex128]
ALL = [*FLOATS, *INTEGERS, *COMPLEX, np.bool_]
LENGTHS = [0, 1, 7, 1000, 300_000]


def values(rank: int, shape: Any, dtype: type) -> Any:
    """Small numbers, other ones on each rank."""
    count = int(np.prod(shape))
    return ((np.arange(count) * 3 + rank) % 7 + 1).reshape(shape).astype(dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *COMPLEX])
def test_allreduce_of_every_type(dtype: type, rank: int, size: int) -> None:
    operators: dict[str, Callable[..., Any]] = {"sum": np.add.reduce, "product": np.multiply.reduce}
    if dtype in COMPLEX:
        del operators["product"]
    else:
        operators |= {"min": np.minimum.reduce, "max": np.maximum.reduce}
    if dtype in INTEGERS:
        operators |= {"bit_and": np.bitwise_and.reduce, "bit_or": np.bitwise_or.reduce}
        operators |= {"bit_xor": np.bitwise_xor.reduce}
    for op, reference in operators.items():
        for length in LENGTHS[:4]:
            mine = values(rank, (length,), dtype)
            found = mc.allreduce(mine, op)
            expected = reference(np.stack([values(other, (length,), dtype) for other in range(size)]), dtype=dtype)
            assert found.dtype == mine.dtype
            assert np.array_equal(found, expected), (op, length)
            assert np.array_equal(mine, values(rank, (length,), dtype)), "the argument stays as it is"


def test_bools_are_combined_logically(rank: int, size: int) -> None:
    assert mc.allreduce(np.array([rank == 0, True]), "bit_and").tolist() == [size == 1, True]
    assert mc.allreduce(np.array([rank == 0, False]), "bit_or").tolist() == [True, False]


def test_numbers_keep_their_types(rank: int, size: int) -> None:
    total = size * (size - 1) // 2
    assert mc.allreduce(rank) == total
    assert isinstance(mc.allreduce(rank), int)
    assert mc.allreduce(rank + 0.5, "max") == size - 0.5
    assert mc.allreduce(complex(rank, 1)) == complex(total, size)
    found = mc.allreduce(np.float32(rank))
    assert isinstance(found, np.float32)
    assert found == total
    assert mc.all_gather(rank).tolist() == list(range(size))


def test_lists_are_one_call_and_factors_scale(rank: int, size: int) -> None:
    arrays = [np.full(3, rank, np.float32), np.full((2, 2), 2 * rank, np.int64), np.zeros(0, np.float64)]
    found = mc.allreduce(arrays)
    total = size * (size - 1) // 2
    assert [array.shape for array in found] == [(3,), (2, 2), (0,)]
    assert (found[0] == total).all()
    assert (found[1] == 2 * total).all()
    assert (mc.allreduce(np.ones(5), prescale=2.0, postscale=0.5) == size).all()
    assert np.allclose(mc.allreduce(np.ones(5), "adasum"), 1)
    out = np.empty(3, np.float32)
    assert mc.allreduce(arrays[0], out=out) is out
    assert mc.allreduce(out, "max", out=out) is out
    assert (out == total).all()


@pytest.mark.parametrize("dtype", ALL)
def test_data_moves_in_every_type(dtype: type, rank: int, size: int) -> None:
    for length in (0, 1, 1000):
        mine = values(rank, (length, 2), dtype)
        joined = np.concatenate([values(other, (length, 2), dtype) for other in range(size)])
        assert np.array_equal(mc.all_gather(mine), joined)
        for root in range(size):
            found = mc.gather(mine, root)
            assert found is None if rank != root else np.array_equal(found, joined)
            block = np.empty((length, 2), dtype)
            assert mc.scatter(joined if rank == root else None, root, out=block) is block
            assert np.array_equal(block, mine)
        spread = np.concatenate([values(rank + 10 * other, (length,), dtype) for other in range(size)])
        expected = np.concatenate([values(other + 10 * rank, (length,), dtype) for other in range(size)])
        assert np.array_equal(mc.all_to_all(spread), expected)


@pytest.mark.parametrize("length", LENGTHS)
def test_an_allreduce_is_a_gathered_reduce_scatter(length: int, rank: int, size: int) -> None:
    rng = np.random.default_rng(rank)
    array = rng.standard_normal(length * size).astype(np.float32)
    for op in ("sum", "mean", "min"):
        block = mc.reduce_scatter(array, op)
        assert block.shape == (length,)
        assert np.array_equal(mc.all_gather(block), mc.allreduce(array, op))
    for root in range(size):
        found = mc.reduce(array, root)
        expected = mc.allreduce(array)
        assert found is None if rank != root else np.array_equal(found, expected)


def test_blocks_of_different_lengths(rank: int, size: int) -> None:
    counts = [3 * other for other in range(size)]
    joined = np.concatenate([values(other, (3 * other, 2), np.float32) for other in range(size)])
    mine = values(rank, (3 * rank, 2), np.float32)
    assert np.array_equal(mc.all_gather(mine, counts=counts), joined)
    assert np.array_equal(mc.all_gather(mine, ragged=True), joined)
    found = mc.gather(mine, size - 1, ragged=True)
    assert found is None if rank != size - 1 else np.array_equal(found, joined)
    block = np.empty((3 * rank, 2), np.float32)
    mc.scatter(joined if rank == 0 else None, out=block, counts=counts)
    assert np.array_equal(block, mine)
    assert np.array_equal(mc.reduce_scatter(joined, counts=counts), size * mine)
    # Rank s sends r + 1 numbers to rank r.
    sent = np.concatenate([np.full(other + 1, 10 * rank + other) for other in range(size)])
    received = mc.all_to_all(sent, send_counts=[other + 1 for other in range(size)])
    assert received.tolist() == [10 * other + rank for other in range(size) for _ in range(rank + 1)]


def test_handles_end_in_any_order(rank: int, size: int) -> None:
    arrays = [np.full(50_000, index + rank, np.float64) for index in range(6)]
    works = [mc.allreduce(array, async_op=True) for array in arrays]
    total = size * (size - 1) // 2
    for index in (5, 0, 3):
        assert (works[index].wait() == size * index + total).all()
        assert works[index].test()
    # The others are dropped; they keep their arrays until they have ended.
    del works, arrays
    gc.collect()
    mc.barrier()
    gathered = mc.all_gather(np.array([rank]), async_op=True)
    assert gathered.wait(timeout=60).tolist() == list(range(size))
    assert gathered.wait().tolist() == list(range(size))


def test_handles_are_awaitable(rank: int, size: int) -> None:
    async def program() -> list[Any]:
        works = [mc.allreduce(np.full(1000, index + rank), async_op=True) for index in range(4)]
        return list(await asyncio.gather(*works))

    total = size * (size - 1) // 2
    for index, found in enumerate(asyncio.run(program())):
        assert (found == size * index + total).all()


def test_messages(rank: int, size: int) -> None:
    following, before = (rank + 1) % size, (rank - 1) % size
    for length in (0, 5, 100_000):
        out = np.full(length, -1.0)
        status = mc.sendrecv(np.full(length, float(rank)), following, out, before, send_tag=3)
        assert status == (before, 3, 8 * length)
        assert (out == before).all()
    if rank == 0:
        found = []
        for _ in range(size - 1):
            number = np.empty(1, np.int32)
            status = mc.recv(number, tag=7)
            found.append((status.source, int(number[0])))
        assert sorted(found) == [(other, 2 * other) for other in range(1, size)]
    else:
        mc.send(np.array([2 * rank], np.int32), 0, tag=7)
    out = np.empty(100_000)
    received = mc.recv(out, before, async_op=True)
    sent = mc.send(np.full(100_000, float(rank)), following, async_op=True)
    assert received.wait().source == before
    sent.wait()
    assert (out == before).all()


def test_objects(rank: int, size: int) -> None:
    mine = {"rank": rank, "text": "x" * (rank * 1000)}
    everybody = [{"rank": other, "text": "x" * (other * 1000)} for other in range(size)]
    assert mc.all_gather_object(mine) == everybody
    for root in range(size):
        found = mc.gather_object(mine, root)
        assert found == (everybody if rank == root else None)
        assert mc.broadcast_object(mine if rank == root else None, root) == everybody[root]


def test_groups(rank: int, size: int) -> None:
    with mc.Group(name="all, backwards", ranks=range(size)[::-1]) as group:
        assert (group.rank, group.size, group.ranks) == (size - 1 - rank, size, tuple(range(size))[::-1])
        assert mc.all_gather(np.array([rank]), group=group).tolist() == list(range(size))[::-1]
        assert mc.broadcast([np.array([rank])], 0, group=group)[0].tolist() == [size - 1]
        assert mc.broadcast_object(rank, 0, group=group) == size - 1
        mc.barrier(group=group)
    with pytest.raises(mc.ArgumentError, match="freed"):
        mc.allreduce(1, group=group)
    parity = mc.split(rank % 2, key=-rank)
    assert parity is not None
    same = [other for other in range(size) if other % 2 == rank % 2][::-1]
    assert parity.ranks == tuple(same)
    assert mc.allreduce(rank, group=parity) == sum(same)
    alone = mc.split(0 if rank == size - 1 else None)
    if rank == size - 1:
        assert alone is not None
        assert mc.allreduce(5, "max", group=alone) == 5
    else:
        assert alone is None


def test_two_groups_at_work_at_once(rank: int, size: int) -> None:
    groups = [mc.Group(name="one"), mc.Group(name="two")]
    order = groups if rank % 2 else groups[::-1]
    works = {id(group): mc.allreduce(np.full(10_000, rank), group=group, async_op=True) for group in order}
    for group in groups:
        assert (works[id(group)].wait() == size * (size - 1) // 2).all()


def test_bad_arguments_change_nothing(rank: int, size: int) -> None:
    array = np.ones(4, np.float32)
    for bad, text in [
        (lambda: mc.allreduce(array, "avg"), "invalid op"),
        (lambda: mc.allreduce(array, "max", prescale=2.0), "factors of a sum"),
        (lambda: mc.allreduce([]), "empty"),
        (lambda: mc.allreduce(array, out=np.ones(5, np.float32)), "out: array 0"),
        (lambda: mc.allreduce(array, out=np.ones(4)), "out: array 0"),
        (lambda: mc.allreduce(np.ones((4, 4))[:, ::2]), "C-contiguous"),
        (lambda: mc.allreduce(np.ma.masked_array([1.0], [True])), "masked"),
        (lambda: mc.reduce(array, size), "invalid root"),
        (lambda: mc.reduce_scatter(np.ones(size + 1) if size > 1 else np.float32(1)), "multiple|axis"),
        (lambda: mc.all_gather(array, counts=[4] * (size + 1)), "invalid counts"),
        (lambda: mc.all_to_all(np.ones(size), receive_counts=[1] * size), "send_counts"),
        (lambda: mc.send(array, size), "invalid dest"),
        (lambda: mc.recv(array, tag=-1), "invalid tag"),
        (lambda: mc.allreduce(array, group=3), "invalid group"),  # type: ignore[arg-type]
        (lambda: mc.Group([size]), "rank"),
        (lambda: mc.Group([]), "empty"),
    ]:
        with pytest.raises(mc.ArgumentError, match=text):
            bad()
    for wrong in ("text", None, object()):
        with pytest.raises(mc.DTypeError):
            mc.allreduce(wrong)
    with pytest.raises(mc.DTypeError, match="bool"):
        mc.allreduce(np.array([True]), "min")
    assert (mc.allreduce(array) == size).all()


def test_a_mismatch_is_an_error_on_every_rank_and_ends_nothing(rank: int, size: int) -> None:
    if size == 1:
        return
    with pytest.raises(mc.MismatchError):
        mc.allreduce(np.ones(3 + (rank == 0)), "sum", name="differs")
    assert mc.allreduce(1) == size


def test_shapes_of_blocks_must_match(rank: int, size: int) -> None:
    if size == 1:
        return
    other = np.ones((2, 3) if rank == 0 else (3, 2))
    for call in (mc.allreduce, mc.all_gather):
        with pytest.raises(mc.MismatchError, match="2, 3"):
            call(other)
    blocks = np.ones((2 * size, 3) if rank == 0 else (3 * size, 2))
    for call in (mc.reduce_scatter, mc.all_to_all):
        with pytest.raises(mc.MismatchError, match="2, 3"):
            call(blocks)
    assert mc.allreduce(1) == size


def test_all_to_alls_in_different_order(rank: int, size: int) -> None:
    """Calls of one name are told apart by their lengths."""
    lengths = [3, 5, 4] if rank == 0 else [5, 4, 3]
    for _ in range(3):
        works = {n: mc.all_to_all(np.full(n * size, rank, np.float32), async_op=True) for n in lengths}
        for n, work in works.items():
            assert work.wait().tolist() == [float(peer) for peer in range(size) for _ in range(n)]
