"""Every collective on the arrays of each framework, on 1, 2, 3 ranks: values, groups, handles, gradients, bad input."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dl_comm
from frameworks import ALL, COMPLEX, INTEGERS, NUMBERS, Framework, dtype_of, same

LENGTHS = [0, 1, 7, 1000]
REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": np.add.reduce,
    "product": np.multiply.reduce,
    "min": np.minimum.reduce,
    "max": np.maximum.reduce,
    "bit_and": np.bitwise_and.reduce,
    "bit_or": np.bitwise_or.reduce,
    "bit_xor": np.bitwise_xor.reduce,
}


def values(rank: int, shape: Any, dtype: str = "float32") -> Any:
    """Small numbers, other ones on each rank."""
    return ((np.arange(int(np.prod(shape))) * 3 + rank) % 7 + 1).reshape(shape).astype(dtype_of(dtype))


def joined_values(size: int, shape: Any, dtype: str = "float32") -> Any:
    """Those of all ranks, along the first axis."""
    return np.concatenate([values(rank, shape, dtype) for rank in range(size)])


@pytest.mark.parametrize("dtype", NUMBERS)
def test_reductions_of_every_type(framework: Framework, dtype: str, rank: int, size: int) -> None:
    comm, make = framework.comm, framework.make
    operators = ["sum"] if dtype in COMPLEX else list(REDUCTIONS) if dtype in INTEGERS else list(REDUCTIONS)[:4]
    for op in operators:
        for length in LENGTHS:
            blocks = [values(other, size * length, dtype) for other in range(size)]
            total = REDUCTIONS[op](np.stack(blocks), dtype=dtype_of(dtype))
            mine, expected = make(blocks[rank][:length]), total[:length]
            framework.check(comm.allreduce(mine, op), expected)
            for root in range(size) if op == "sum" else [size - 1]:
                framework.check(comm.reduce(mine, root, op), framework.on_root(expected, rank == root))
            framework.check(mine, blocks[rank][:length])
            found = comm.reduce_scatter(make(blocks[rank]), op)
            framework.check(found, total[rank * length : (rank + 1) * length])


@pytest.mark.parametrize("dtype", ALL)
def test_data_moves_in_every_type(framework: Framework, dtype: str, rank: int, size: int) -> None:
    comm, make, check = framework.comm, framework.make, framework.check
    everyone = comm.Group()
    for length in (0, 1, 1000):
        mine, joined = values(rank, (length, 2), dtype), joined_values(size, (length, 2), dtype)
        check(comm.all_gather(make(mine)), joined)
        for root in range(size):
            check(comm.gather(make(mine), root), framework.on_root(joined, rank == root, gathered=True))
            if framework.supports("out"):
                block = make(np.empty_like(mine))
                assert comm.scatter(make(joined) if rank == root else None, root, out=block) is block
                check(block, mine)
            check(comm.scatter(make(joined if rank == root else np.zeros_like(joined)), root), mine)
            for options in ({"group": everyone}, {}):
                check(framework.broadcast(make(mine), root, **options), values(root, (length, 2), dtype))
        spread = np.concatenate([values(rank + 10 * other, length, dtype) for other in range(size)])
        expected = np.concatenate([values(other + 10 * rank, length, dtype) for other in range(size)])
        check(comm.all_to_all(make(spread)), expected)


def test_means_and_bools(framework: Framework, rank: int, size: int) -> None:
    def reduced(numbers: list[Any], op: str) -> Any:
        return framework.array(framework.comm.allreduce(framework.make(np.array(numbers)), op)).tolist()

    middle = (size - 1) // 2
    assert reduced([rank, -rank, -1, -7], "mean") == [middle, -middle, -1, -7]
    assert reduced([rank == 0, True], "bit_and") == [size == 1, True]
    assert reduced([rank == 0, False], "bit_or") == [True, False]


def test_numbers(framework: Framework, rank: int, size: int) -> None:
    comm = framework.comm
    total = size * (size - 1) // 2
    for given, op, expected in [
        (rank, "sum", total),
        (rank + 0.5, "max", size - 0.5),
        (complex(rank, 1), "sum", complex(total, size)),
        (rank == 0, "bit_or", True),
    ]:
        found = comm.allreduce(given, op)
        if framework.supports("numbers"):
            assert type(found) is type(given)
            assert found == expected
        else:
            framework.check(found, np.array(expected))
    assert comm.allreduce(np.float32(rank)) == total
    framework.check(comm.all_gather(rank), np.arange(size))
    framework.check(comm.allreduce(framework.make(np.float32(1.5))), np.float32(1.5 * size))
    framework.check(comm.reduce(1, size - 1), framework.on_root(np.array(size), rank == size - 1))


def test_lists_are_one_call_and_factors_scale(framework: Framework, rank: int, size: int) -> None:
    comm, make, check = framework.comm, framework.make, framework.check
    total = size * (size - 1) // 2
    found = comm.allreduce([make(np.full(3, rank, np.float32)), make(np.full((2, 2), 2 * rank)), make(np.zeros(0))])
    assert isinstance(found, list)
    check(found, [np.full(3, total, np.float32), np.full((2, 2), 2 * total), np.zeros(0)])
    ranks = np.arange(size)
    found = comm.all_gather([make(np.full((2, 3), rank)), make(np.array(rank))])
    check(found, [ranks.repeat(6).reshape(2 * size, 3), ranks])
    check(comm.allreduce(make(np.ones(5)), prescale=2.0, postscale=0.5), np.full(5, float(size)))
    third = 1 / 3  # not exact in float32
    check(comm.allreduce(make(np.ones(2)), prescale=third, postscale=5.0), np.full(2, size * 5 / 3), tolerance=1e-15)
    check(comm.reduce_scatter(make(np.ones(2 * size)), postscale=third), np.full(2, size / 3), tolerance=1e-15)
    check(comm.allreduce(make(np.ones(5, np.float32)), "adasum"), np.ones(5, np.float32), tolerance=1e-6)


FACTORS = (0.5, 1.5)
SCALED_TYPES = ["float16", "float32", "float64", "int8", "uint8", "int32", "int64"]


@pytest.mark.parametrize("dtype", SCALED_TYPES)
@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "product"])
def test_factors_of_every_operator(
    framework: Framework, op: dl_comm.Operator, dtype: str, rank: int, size: int
) -> None:
    """Integers are rounded toward zero after each factor."""
    comm, kind = framework.comm, np.dtype(dtype)
    integral = np.trunc if kind.kind in "iu" else lambda x: x
    values = np.array([[1, 4, 7, 10 - other] for other in range(size)])
    inputs = values if kind.kind == "u" else values * [1, -1, 1, -1]
    before, after = FACTORS
    scaled = integral(inputs * before)
    reduced = {"mean": np.sum, "product": np.prod}.get(op, getattr(np, op, None))(scaled, 0)
    expected = integral(reduced * after / (size if op == "mean" else 1)).astype(kind)
    tolerance = 0 if kind.kind in "iu" else {2: 2e-3, 4: 1e-6, 8: 1e-15}[kind.itemsize]
    x = framework.make(inputs[rank].astype(kind))
    framework.check(comm.allreduce(x, op, prescale=before, postscale=after), expected, tolerance=tolerance)
    work = comm.allreduce([x, x], op, prescale=before, postscale=after)
    framework.check(work, [expected, expected], tolerance=tolerance)
    block = comm.reduce_scatter(
        framework.make(np.tile(inputs[rank], size).astype(kind)), op, prescale=before, postscale=after
    )
    framework.check(block, expected, tolerance=tolerance)


@pytest.mark.needs("out")
def test_results_are_written_into_given_arrays(framework: Framework, rank: int, size: int) -> None:
    comm, make, check = framework.comm, framework.make, framework.check
    total = size * (size - 1) // 2
    given = [make(np.full(3, rank, np.float32)), make(np.full((2, 2), 2 * rank)), make(np.zeros(0))]
    out = make(np.empty(3, np.float32))
    assert comm.allreduce(given[0], out=out) is out
    assert comm.allreduce(out, "max", out=out) is out
    check(out, np.full(3, total, np.float32))
    assert comm.allreduce(given, "max", out=given) is given
    check(given[1], np.full((2, 2), 2 * (size - 1)))
    mine, ranks = make(np.full(size, float(rank))), np.arange(float(size))
    for call, options, expected in [
        (comm.all_gather, {}, ranks.repeat(size)),
        (comm.reduce_scatter, {}, np.array([float(total)])),
        (comm.all_to_all, {}, ranks),
        (comm.gather, {"root": 0}, ranks.repeat(size)),
        (comm.reduce, {"root": size - 1}, np.full(size, float(total))),
    ]:
        result = make(np.empty_like(expected)) if options.get("root", rank) == rank else None
        assert call(mine, out=result, **options) is result
        check(result, None if result is None else expected)


@pytest.mark.parametrize("length", [*LENGTHS, 300_000])
def test_an_allreduce_is_a_gathered_reduce_scatter(framework: Framework, length: int, rank: int, size: int) -> None:
    comm = framework.comm
    tensor = framework.make(np.random.default_rng(rank).standard_normal(length * size).astype(np.float32))
    for op in ("sum", "mean", "min"):
        block, whole = comm.reduce_scatter(tensor, op), framework.array(comm.allreduce(tensor, op))
        assert block.shape == (length,)
        framework.check(comm.all_gather(block), whole)
        for root in range(size):
            framework.check(comm.reduce(tensor, root, op), framework.on_root(whole, rank == root))


def test_blocks_of_different_lengths(framework: Framework, mode: str, rank: int, size: int) -> None:
    comm = framework.comm
    counts = [3 * other for other in range(size)]
    blocks = [values(other, (3 * other, 2)) for other in range(size)]
    mine, joined = blocks[rank], np.concatenate(blocks)
    # Rank s sends r + 1 numbers to rank r.
    sent = [other + 1 for other in range(size)]
    spread = np.concatenate([np.full(other + 1, 10 * rank + other) for other in range(size)])

    def run(mine: Any, joined: Any, spread: Any, block: Any) -> list[Any]:
        if framework.supports("out"):
            comm.scatter(joined if rank == 0 else None, out=block, counts=counts)
        again = comm.scatter(joined if rank == 0 else 0 * joined, counts=counts)
        return [
            comm.all_gather(mine, counts=counts),
            comm.all_gather(mine, ragged=True, name="other"),
            comm.gather(mine, size - 1, ragged=True),
            comm.gather(mine, size - 1, counts=counts, name="another"),
            block if framework.supports("out") else again,
            again,
            comm.reduce_scatter(joined, counts=counts),
            comm.all_to_all(spread, send_counts=sent),
            comm.all_to_all(spread, send_counts=sent, receive_counts=[rank + 1] * size, name="known"),
            comm.all_gather(framework.sum(mine), ragged=True, name="of a scalar"),
        ]

    found = framework.runner(run, mode)(mine, joined, spread, np.empty_like(mine))
    at_root = framework.on_root(joined, rank == size - 1, gathered=True)
    received = np.array([10 * other + rank for other in range(size) for _ in range(rank + 1)])
    sums = np.array([each.sum() for each in blocks])
    expected = [joined, joined, at_root, at_root, mine, mine, size * mine, received, received, sums]
    same(found, expected, tolerance=1e-6)


def test_lists_of_different_lengths(framework: Framework, mode: str, rank: int, size: int) -> None:
    """Each array has its own lengths."""
    lengths = [[other + 1 for other in range(size)], [(3 * other) % 4 for other in range(size)]]

    def run(one: Any, two: Any) -> Any:
        return framework.comm.all_gather([one, two], ragged=True, name="list")

    given = [np.full((rows[rank], 2), rank, kind) for rows, kind in zip(lengths, ("f4", "i8"), strict=True)]
    found = framework.runner(run, mode)(*given)
    joined = [np.repeat(np.arange(size), rows)[:, np.newaxis].repeat(2, 1) for rows in lengths]
    same(found, [joined[0].astype("f4"), joined[1]])


@pytest.mark.needs("async")
@pytest.mark.parametrize("by_name", [False, True])
def test_lengths_travel_inside_the_call(framework: Framework, by_name: bool, rank: int, size: int) -> None:
    """Calls start at once, whatever the other ranks do: here each waits for them in its own order."""
    comm, make, check = framework.comm, framework.make, framework.check
    options: dict[str, Any] = {"by_name": by_name, "async_op": True, "return_counts": True}
    rows = [2 * other for other in range(size)]
    gathers = [
        comm.all_gather(make(np.full((rows[rank], 3), rank + i)), ragged=True, name=f"gather {i % 3}", **options)
        for i in range(6)
    ]
    total = comm.allreduce(make(np.ones(3)), name="sum", by_name=by_name, async_op=True)
    send = [rank + to for to in range(size)]
    sent = np.repeat(10 * rank + np.arange(size), send)
    exchange = comm.all_to_all(make(sent), send_counts=send, name="exchange", **options)
    lists = comm.all_to_all([make(sent), make(sent[:0])], send_counts=[send, [0] * size], name="lists", **options)
    received = np.repeat(10 * np.arange(size) + rank, [other + rank for other in range(size)])

    def check_exchanges() -> None:
        y, counts = exchange.wait()
        check(y, received)
        (one, none), both = lists.wait()
        check([one, none], [received, sent[:0]])
        assert counts == [other + rank for other in range(size)]
        assert both == [counts, [0] * size]

    if rank % 2:
        check_exchanges()
    for i in reversed(range(6)) if rank % 2 else range(6):
        y, counts = gathers[i].wait()
        check(y, np.repeat(np.arange(size) + i, rows)[:, np.newaxis].repeat(3, 1))
        assert counts == rows
    if rank % 2 == 0:
        check_exchanges()
    check(total.wait(), np.full(3, float(size)))


@pytest.mark.needs("async")
def test_counts_of_the_result(framework: Framework, rank: int, size: int) -> None:
    comm, make, check = framework.comm, framework.make, framework.check
    options: dict[str, Any] = {"return_counts": True}
    rows = list(range(1, size + 1))
    x = make(np.ones((rank + 1, 2)))
    assert comm.all_gather(x, counts=rows, **options)[1] == rows == comm.all_gather(x, ragged=True, **options)[1]
    assert comm.all_gather([x[:1], x[:1]], **options)[1] == [[1] * size] * 2
    assert comm.all_gather(3, **options)[1] == [1] * size
    assert comm.all_gather(x[:1], async_op=True, **options).wait()[1] == [1] * size
    even = make(np.ones(2 * size))
    assert comm.all_to_all(even, **options)[1] == [2] * size
    send = {"send_counts": [rank + 1] * size}
    spread = make(np.ones((rank + 1) * size))
    assert comm.all_to_all(spread, **send, receive_counts=rows, **options)[1] == rows
    assert comm.all_to_all(spread, **send, **options)[1] == rows
    empty, counts = comm.all_gather(make(np.ones((rank + 1, 0))), ragged=True, **options)
    check(empty, np.ones((sum(rows), 0)))
    assert counts == rows
    out = make(np.zeros((sum(rows), 2)))
    assert comm.all_gather(x, ragged=True, out=out) is out
    check(out, np.ones((sum(rows), 2)))


@pytest.mark.needs("async")
def test_handles_end_in_any_order(framework: Framework, rank: int, size: int) -> None:
    comm, make, check = framework.comm, framework.make, framework.check
    given = [make(np.full(50_000, index + rank, np.float32)) for index in range(6)]
    works = [comm.allreduce(each, async_op=True) for each in given]
    assert isinstance(works[0], dl_comm.Work)
    total = size * (size - 1) // 2
    for index in (5, 0, 3):
        expected = np.full(50_000, size * index + total, np.float32)
        check(works[index].wait(), expected)
        assert works[index].test()
        check(works[index].wait(timeout=60), expected)
    # The others are dropped; they keep their arrays until they have ended.
    del works, given
    gc.collect()
    comm.barrier()
    gathered = comm.all_gather(make(np.array([rank])), async_op=True)
    for _ in range(2):
        check(gathered.wait(timeout=60), np.arange(size))
    results = [make(np.empty(size, np.int64)), make(np.empty(size))]
    gathered = comm.all_gather([make(np.array([rank])), make(np.ones(1))], out=results, async_op=True)
    assert gathered.wait() is results
    check(results[0], np.arange(size))
    spread = comm.broadcast([make(np.full(1000, float(rank)))], size - 1, async_op=True)
    check(spread.wait()[0], np.full(1000, size - 1.0))


@pytest.mark.needs("async")
def test_dropped_handles_release_their_arrays(framework: Framework, rank: int, size: int) -> None:
    alive = []
    for _ in range(20):
        tensor = framework.make(np.ones(1000))
        alive.append(weakref.ref(tensor if isinstance(tensor, np.ndarray) else tensor.untyped_storage()))
        framework.comm.allreduce(tensor, out=tensor, async_op=True)
        del tensor
    framework.comm.barrier()
    for _ in range(100):
        framework.comm.allreduce(1, async_op=True).wait()
        gc.collect()
        if not any(reference() is not None for reference in alive):
            break
    assert not any(reference() is not None for reference in alive)


@pytest.mark.needs("async")
def test_handles_are_awaitable(framework: Framework, rank: int, size: int) -> None:
    async def program() -> list[Any]:
        given = [framework.make(np.full(1000, index + rank)) for index in range(4)]
        return list(await asyncio.gather(*[framework.comm.allreduce(each, async_op=True) for each in given]))

    for index, found in enumerate(asyncio.run(program())):
        framework.check(found, np.full(1000, size * index + size * (size - 1) // 2))


@pytest.mark.needs("async")
def test_all_to_alls_in_different_order(framework: Framework, rank: int, size: int) -> None:
    """Calls of one name are told apart by their lengths."""
    lengths = [3, 5, 4] if rank == 0 else [5, 4, 3]
    for _ in range(3):
        given = {n: framework.make(np.full(n * size, rank, np.float32)) for n in lengths}
        works = {n: framework.comm.all_to_all(each, async_op=True) for n, each in given.items()}
        for n, work in works.items():
            framework.check(work.wait(), np.arange(size, dtype=np.float32).repeat(n))


def test_messages(framework: Framework, mode: str, rank: int, size: int) -> None:
    following, before = (rank + 1) % size, (rank - 1) % size

    def run(short: Any, integers: Any, long: Any, *like: Any) -> list[Any]:
        def exchanged(x: Any, like: Any, tag: int) -> Any:  # a session may run them in any order
            return framework.sendrecv(x, following, like, before, send_tag=tag, recv_tag=tag)

        (floats, numbers), status = exchanged([short, integers], [like[0], like[1]], 2)
        # A shorter message leaves the rest as it is.
        ring, about = exchanged(long, like[2], 3)
        pair, filled = exchanged(short, [like[3], like[4]], 4)
        return [floats, numbers, ring, *pair, [*status, *about, *filled]]

    program = framework.runner(run, mode)
    for length in (0, 5, 100_000):
        *found, numbers = program(
            *(np.arange(5.0) + rank, np.full(3, rank, np.int16), np.full(length, rank, np.float32)),
            *(np.zeros(5), np.zeros(3, np.int16), np.full(length + 1, -1, np.float32)),
            *(np.full((2, 2), -1.0), np.full(3, -1.0)),
        )
        ring = np.array([before] * length + [-1], np.float32)
        pair = [np.arange(4.0).reshape(2, 2) + before, np.array([4.0 + before, -1, -1])]
        same(found, [np.arange(5.0) + before, np.full(3, before, np.int16), ring, *pair])
        assert numbers == [before, 2, 5 * 8 + 3 * 2, before, 3, 4 * length, before, 4, 5 * 8]


def test_a_send_and_a_receive(framework: Framework, rank: int, size: int) -> None:
    comm, make = framework.comm, framework.make
    if rank > 0:
        assert comm.send(make(np.array([2 * rank], np.int16)), 0, tag=7) is None
    else:
        found = [framework.recv(make(np.zeros(1, np.int16)), tag=7) for _ in range(1, size)]
        sources = [(int(status.source), framework.array(number).tolist()) for number, status in found]
        assert sorted(sources) == [(other, [2 * other]) for other in range(1, size)]
        with pytest.raises(dl_comm.TimeoutError):
            framework.recv(make(np.zeros(1)), timeout=0.1)
    comm.barrier()
    comm.send(make(np.ones(1)), rank)
    number, _ = framework.recv(make(np.zeros(1)), rank)
    framework.check(number, np.ones(1))
    following, before = (rank + 1) % size, (rank - 1) % size
    number, status = framework.sendrecv(make(np.array([float(rank)])), following, make(np.zeros(1)), before, send_tag=3)
    assert [int(each) for each in status] == [before, 3, 8]
    framework.check(number, np.array([float(before)]))


def test_a_message_of_another_type_is_refused(framework: Framework, rank: int, size: int) -> None:
    """Also if it has as many bytes; the next one arrives."""
    following, before = (rank + 1) % size, (rank - 1) % size
    for length in (3, 10_000):
        sent, expected = values(rank, length, "int32"), values(before, length, "int32")
        with framework.raises(dl_comm.MismatchError, "int32"):
            framework.sendrecv(framework.make(sent), following, framework.make(np.zeros(length, np.float32)), before)
        like = framework.make(np.zeros(length, np.int32))
        framework.check(framework.sendrecv(framework.make(sent), following, like, before)[0], expected)


@pytest.mark.needs("async")
def test_messages_with_handles(framework: Framework, rank: int, size: int) -> None:
    comm, make, check = framework.comm, framework.make, framework.check
    following, before = (rank + 1) % size, (rank - 1) % size
    pair = [make(np.empty(100_000, np.complex64)), make(np.empty(3))]
    received = comm.recv(pair, before, async_op=True)
    sent = comm.send([make(np.full(100_000, 1j * rank, np.complex64)), make(np.ones(3))], following, async_op=True)
    assert received.wait().source == before
    sent.wait()
    check(pair[0], np.full(100_000, 1j * before, np.complex64))
    check(pair[1], np.ones(3))
    received = comm.recv(pair[1], before, async_op=True)
    comm.send(make(np.ones(3)), following)
    assert received.wait().bytes == 24
    pair[1][:] = 0
    assert received.wait().bytes == 24
    check(pair[1], np.zeros(3))  # the second wait copies nothing


@pytest.mark.needs("async")
def test_a_wait_that_ends_early_can_be_repeated(framework: Framework, rank: int, size: int) -> None:
    if size == 1:
        return
    number = framework.make(np.empty(1, np.float32))
    if rank == 0:
        work = framework.comm.recv(number, 1, tag=9, async_op=True)
        with pytest.raises(dl_comm.TimeoutError, match="goes on"):
            work.wait(timeout=0.05)
        assert not work.test()
        framework.comm.barrier()
        assert work.wait() == (1, 9, 4)
        assert number == 5
        return
    framework.comm.barrier()
    if rank == 1:
        framework.comm.send(framework.make(np.array([5.0], np.float32)), 0, tag=9)


def test_objects(framework: Framework, rank: int, size: int) -> None:
    comm = framework.comm
    mine = {"rank": rank, "text": "x" * (rank * 1000)}
    everybody = [{"rank": other, "text": "x" * (other * 1000)} for other in range(size)]
    assert comm.all_gather_object(mine) == everybody
    for root in range(size):
        assert comm.gather_object(mine, root) == (everybody if rank == root else None)
        assert comm.broadcast_object(mine if rank == root else None, root) == everybody[root]


def test_groups(framework: Framework, mode: str, rank: int, size: int) -> None:
    """All ranks backwards, and two of them; the third one, if there is one, makes other calls."""
    for members in (list(range(size))[::-1], list(range(size))[-2:][::-1]):
        if rank not in members:
            continue
        with framework.comm.Group(members, name=f"{len(members)}, backwards") as group:
            assert (group.rank, group.size, group.ranks) == (members.index(rank), len(members), tuple(members))
            check_a_group(framework, mode, group, rank)
            framework.comm.barrier(group=group)
        calls = (framework.comm.allreduce, framework.comm.reduce, framework.comm.all_gather, framework.comm.all_to_all)
        for call in calls:
            with pytest.raises(dl_comm.ArgumentError, match="freed"):
                call(framework.make(np.ones(12)), group=group)
    framework.check(framework.comm.allreduce(framework.make(np.ones(2))), np.full(2, float(size)))


def check_a_group(framework: Framework, mode: str, group: Any, rank: int) -> None:
    """The collectives in a group, and a message."""
    comm, members, place = framework.comm, list(group.ranks), group.rank
    following, before = (place + 1) % group.size, (place - 1) % group.size

    def run(x: Any, blocks: Any, like: Any) -> list[Any]:
        received, status = framework.sendrecv(x, following, like, before, group=group)
        return [
            comm.allreduce(x, "max", group=group),
            comm.all_gather(x, group=group),
            framework.broadcast(x, 0, group=group),
            received,
            comm.reduce_scatter(blocks, group=group),
            comm.all_to_all(blocks, group=group),
            comm.reduce(x, 0, group=group),
            comm.gather(x, 0, group=group),
            status.source,
        ]

    given = np.array([rank], np.int16), np.arange(group.size) + 10 * rank, np.zeros(1, np.int16)
    *found, source = framework.runner(run, mode)(*given)
    of_blocks = [[10 * sum(members) + group.size * place], [10 * other + place for other in members]]
    narrow = [np.array(each, np.int16) for each in ([max(members)], members, members[:1], [members[before]])]
    at_root = [np.array([sum(members)], np.int16), np.array(members, np.int16)]
    gathered = [framework.on_root(each, place == 0, gathered=each is at_root[1]) for each in at_root]
    same(found, [*narrow, *map(np.array, of_blocks), *gathered])
    assert source == before


def test_numbers_and_objects_in_groups(framework: Framework, rank: int, size: int) -> None:
    comm = framework.comm
    with comm.Group(name="all, backwards", ranks=range(size)[::-1]) as group:
        assert dl_comm.broadcast_object(rank, 0, group=group) == size - 1
        assert comm.all_gather_object(rank, group=group) == list(range(size))[::-1]
    parity = comm.split(rank % 2, key=-rank)
    assert parity is not None
    same = [other for other in range(size) if other % 2 == rank % 2][::-1]
    assert parity.ranks == tuple(same)
    assert comm.allreduce(rank, group=parity) == sum(same)
    alone = comm.split(0 if rank == size - 1 else None)
    if rank == size - 1:
        assert alone is not None
        assert comm.allreduce(5, "max", group=alone) == 5
    else:
        assert alone is None


@pytest.mark.needs("async")
def test_two_groups_at_work_at_once(framework: Framework, rank: int, size: int) -> None:
    groups = [framework.comm.Group(name="one"), framework.comm.Group(name="two")]
    given = framework.make(np.full(10_000, rank))
    order = groups if rank % 2 else groups[::-1]
    works = {id(group): framework.comm.allreduce(given, group=group, async_op=True) for group in order}
    for group in groups:
        framework.check(works[id(group)].wait(), np.full(10_000, size * (size - 1) // 2))


# Calls that are refused: the call, the text of the error, and its type if it is another one than ArgumentError.
BAD: dict[str, tuple[Any, ...]] = {
    "operator": (lambda f, x, size: f.comm.allreduce(x, "avg"), "invalid op"),
    "operator of another type": (lambda f, x, size: f.comm.allreduce(x, 0), "invalid op"),
    "operator that is a list": (lambda f, x, size: f.comm.allreduce(x, ["sum"]), "invalid op"),
    "name": (lambda f, x, size: f.comm.allreduce(x, name=3), "invalid name: 3", dl_comm.DTypeError),
    "name with NUL": (lambda f, x, size: f.comm.gather(x, name="a\0b"), "invalid name"),
    "name of a message": (lambda f, x, size: f.comm.send(x, 0, name=b"a"), "invalid name", dl_comm.DTypeError),
    "factor": (lambda f, x, size: f.comm.allreduce(x, prescale="2"), "invalid prescale: '2'"),
    "factors": (lambda f, x, size: f.comm.allreduce(x, postscale=np.ones(2)), "invalid postscale"),
    "operator for bools": (
        lambda f, x, size: f.comm.allreduce(f.make(np.array([True])), "min"),
        "bool|Bool",
        dl_comm.DTypeError,
    ),
    "factors of adasum": (lambda f, x, size: f.comm.allreduce(x, "adasum", prescale=2.0), "takes no prescale"),
    "no arrays": (lambda f, x, size: f.comm.allreduce([]), "empty"),
    "None": (lambda f, x, size: f.comm.allreduce(None), "None", dl_comm.DTypeError),
    "None in a list": (lambda f, x, size: f.comm.allreduce([x, None]), "None"),
    "None to broadcast": (lambda f, x, size: f.comm.broadcast([None]), "None"),
    "object in a list": (lambda f, x, size: f.comm.all_gather([x, object()]), "object", dl_comm.DTypeError),
    "masked": (lambda f, x, size: f.comm.allreduce(np.ma.masked_array([1.0])), "masked"),
    "masked in a list": (lambda f, x, size: f.comm.all_gather([np.ma.masked_array([1.0]), x]), "masked"),
    "masked to average": (lambda f, x, size: f.comm.gradients([x, np.ma.masked_array([1.0])]), "masked"),
    "counts that are text": (lambda f, x, size: f.comm.all_gather(x, counts="4" * size), "invalid counts"),
    "counts with a fraction": (lambda f, x, size: f.comm.gather(x, counts=[4.5] * size), "invalid counts"),
    "one count": (lambda f, x, size: f.comm.all_to_all(x, send_counts=4), "invalid counts"),
    "ragged": (lambda f, x, size: f.comm.all_gather(x, ragged="no"), "invalid ragged"),
    "text": (lambda f, x, size: f.comm.allreduce("text"), "str", dl_comm.DTypeError),
    "object": (lambda f, x, size: f.comm.allreduce(object()), "object", dl_comm.DTypeError),
    "group": (lambda f, x, size: f.comm.allreduce(x, group=3), "invalid group"),
    "group with a rank too many": (lambda f, x, size: f.comm.Group([size]), "rank"),
    "group of nobody": (lambda f, x, size: f.comm.Group([]), "empty"),
    "group of text": (lambda f, x, size: f.comm.Group("0"), "invalid ranks: '0'"),
    "group with a fraction": (lambda f, x, size: f.comm.Group([0.5]), "invalid ranks, entry 0: 0.5"),
    "name of a group": (lambda f, x, size: f.comm.Group(name=None), "invalid name", dl_comm.DTypeError),
    "threads of a group": (lambda f, x, size: f.comm.Group(threads="2"), "invalid threads"),
    "timeout": (lambda f, x, size: f.comm.allreduce(x, timeout=-1), "invalid timeout"),
    "timeout that is text": (lambda f, x, size: f.comm.allreduce(x, timeout="1"), "invalid timeout"),
    "timeout that is complex": (lambda f, x, size: f.comm.reduce(x, timeout=np.complex64(1)), "invalid timeout"),
    "root": (lambda f, x, size: f.comm.reduce(x, size), "root"),
    "negative root": (lambda f, x, size: f.comm.reduce(x, -1), "root"),
    "root of a broadcast": (lambda f, x, size: f.comm.broadcast([x], size, group=f.comm.Group()), "root"),
    "blocks of a scalar": (lambda f, x, size: f.comm.reduce_scatter(f.make(np.float32(1))), "multiple|axis|rank 1"),
    "too many counts": (lambda f, x, size: f.comm.all_gather(x, counts=[4] * (size + 1)), "one for each rank"),
    "negative counts": (lambda f, x, size: f.comm.reduce_scatter(x, counts=[-1] * size), "invalid counts"),
    "counts of other rows": (
        lambda f, x, size: f.comm.all_gather(x, counts=[5] * size),
        "for this rank",
    ),
    "counts of two arrays": (lambda f, x, size: f.comm.all_gather([x, x], counts=[4] * size), "of the 2 arrays"),
    "counts that end early": (lambda f, x, size: f.comm.all_to_all(x, send_counts=[0] * size), "sum 0"),
    "receive counts only": (lambda f, x, size: f.comm.all_to_all(x, receive_counts=[4] * size), "send_counts"),
    "destination": (lambda f, x, size: f.comm.send(x, size), "dest|rank"),
    "negative destination": (lambda f, x, size: f.comm.send(x, -1), "dest|rank|root"),
    "destination of both": (lambda f, x, size: f.sendrecv(x, size, x), "dest|rank"),
    "tag": (lambda f, x, size: f.recv(x, tag=-1), "invalid tag"),
}
BAD_OUT: dict[str, tuple[Any, ...]] = {
    "nothing": (lambda f, x, size: f.comm.scatter(None, out=None), "scatter needs"),
    "numbers": (lambda f, x, size: f.comm.allreduce(x, out=[1.0]), "float", dl_comm.DTypeError),
    "handle": (lambda f, x, size: f.comm.allreduce(x, async_op="no"), "invalid async_op"),
    "wait": (lambda f, x, size: f.comm.allreduce(x, async_op=True).wait("1"), "invalid timeout"),
    "shape": (lambda f, x, size: f.comm.allreduce(x, out=f.make(np.ones(5, np.float32))), r"out: \w+ 0 has the shape"),
    "type": (lambda f, x, size: f.comm.allreduce(x, out=f.make(np.ones(4))), r"type \w+; the result has .*[Ff]loat"),
    "number": (lambda f, x, size: f.comm.allreduce([x], out=[x, x]), "(has|call has) 1"),
    "strides": (lambda f, x, size: f.comm.allreduce(x, out=f.make(np.ones(8, np.float32))[::2]), "contiguous"),
    "strides to receive": (lambda f, x, size: f.comm.recv(f.make(np.ones(8, np.float32))[::2], 0), "contiguous"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_change_nothing(framework: Framework, case: str, rank: int, size: int) -> None:
    check_refused(framework, size, *BAD[case])


@pytest.mark.needs("out")
@pytest.mark.parametrize("case", BAD_OUT)
def test_bad_arrays_for_results_change_nothing(framework: Framework, case: str, rank: int, size: int) -> None:
    check_refused(framework, size, *BAD_OUT[case])


def check_refused(framework: Framework, size: int, call: Any, text: str, error: Any = dl_comm.ArgumentError) -> None:
    x = framework.make(np.ones(4, np.float32))
    with pytest.raises(error, match=text):
        call(framework, x, size)
    framework.check(framework.comm.allreduce(x), np.full(4, size, np.float32))


def test_blocks_must_divide_the_first_axis(framework: Framework, rank: int, size: int) -> None:
    x = framework.make(np.ones(size + 1))
    for call in (framework.comm.reduce_scatter, framework.comm.all_to_all) if size > 1 else ():
        with pytest.raises(dl_comm.ArgumentError, match="multiple of the"):
            call(x)
    if rank == 0:  # only the root reads its counts
        blocks = {"out": framework.make(np.ones(3))} if framework.supports("out") else {}
        with pytest.raises(dl_comm.ArgumentError, match="ask|sum"):
            framework.comm.scatter(framework.make(np.ones(7)), counts=[3] * size, **blocks)
    framework.check(framework.comm.allreduce(x), np.full(size + 1, float(size)))


def test_calls_match_by_name_in_any_order(framework: Framework, rank: int, size: int) -> None:
    """Each rank waits for its calls in an order of its own, before it starts others."""
    comm, make, names = framework.comm, framework.make, [f"by name {i}" for i in range(6)]
    mine = names if rank % 2 == 0 or not framework.supports("async") else names[::-1]
    for _ in range(2):
        if framework.supports("async"):
            first = {
                name: comm.allreduce(make(np.full(50, rank + i)), name=name, by_name=True, async_op=True)
                for i, name in ((names.index(name), name) for name in mine[:3])
            }
            second = {
                name: comm.allreduce(make(np.full(50, rank + i)), name=name, by_name=True, async_op=True)
                for i, name in ((names.index(name), name) for name in mine[3:])
            }
            found = {name: started.wait() for name, started in {**second, **first}.items()}
        else:
            found = {
                name: comm.allreduce(make(np.full(50, rank + i)), name=name, by_name=True)
                for i, name in enumerate(names)
            }
        for i, name in enumerate(names):
            framework.check(found[name], np.full(50, size * (size - 1) // 2 + size * i))


def test_every_collective_takes_by_name(framework: Framework, rank: int, size: int) -> None:
    comm, x, options = framework.comm, framework.make(np.arange(2.0 * size)), {"by_name": True}
    ones = np.ones(2 * size)
    framework.check(comm.allreduce(x, name="allreduce", **options), size * np.arange(2.0 * size))
    framework.check(comm.all_gather(x[:1], name="all_gather", **options), np.zeros(size))
    framework.check(
        comm.all_gather(x[: rank + 1], name="ragged", ragged=True, **options),
        np.concatenate([np.arange(r + 1.0) for r in range(size)]),
    )
    framework.check(
        comm.reduce_scatter(x, name="reduce_scatter", **options), size * np.arange(2.0 * rank, 2 * rank + 2)
    )
    framework.check(comm.all_to_all(x, name="all_to_all", **options), np.tile([2.0 * rank, 2 * rank + 1], size))
    framework.check(comm.scatter(x, name="scatter", **options), np.arange(2.0 * rank, 2 * rank + 2))
    framework.check(
        framework.broadcast(framework.make(ones * rank), size - 1, name="broadcast", **options), ones * (size - 1)
    )
    at_root = framework.on_root(size * np.arange(2.0 * size), rank == 0)
    framework.check(comm.reduce(x, name="reduce", **options), at_root)
    gathered = framework.on_root(np.zeros(size), rank == 0, gathered=True)
    framework.check(comm.gather(x[:1], name="gather", **options), gathered)
    if framework.supports("gradients"):
        _, gradient = framework.derivative(lambda x: comm.allreduce(x, name="with gradient", by_name=True), x)
        framework.check(gradient, size * ones)
    for wrong in ({}, {"name": ""}):
        with pytest.raises(dl_comm.ArgumentError, match="by_name=True needs a name"):
            comm.allreduce(x, by_name=True, **wrong)
    with pytest.raises(dl_comm.ArgumentError, match="invalid by_name"):
        comm.allreduce(x, name="x", by_name="yes")


def test_a_conflict_of_a_name_fails_no_other_call(framework: Framework, rank: int, size: int) -> None:
    if size == 1 or not framework.supports("async"):
        pytest.skip("needs ranks that differ, and calls in flight")
    comm, odd = framework.comm, rank == size - 1

    def start(name: str, length: int) -> Any:
        return comm.allreduce(framework.make(np.ones(length)), name=name, by_name=True, async_op=True)

    before, conflict = start("before", 5), start("conflict", 3 + odd)
    after = start("after", 7)
    with pytest.raises(dl_comm.MismatchError, match="conflict"):
        conflict.wait()
    framework.check(after.wait(), np.full(7, float(size)))
    framework.check(before.wait(), np.full(5, float(size)))
    framework.check(start("conflict", 3).wait(), np.full(3, float(size)))


# Calls of which the last rank makes another one than the others.
DIFFERENT: dict[str, Callable[[Framework, bool], Any]] = {
    "shape": lambda f, odd: f.comm.allreduce(f.make(np.ones(3 if odd else 2)), name="differs"),
    "operator": lambda f, odd: f.comm.allreduce(f.make(np.ones(2)), "max" if odd else "min"),
    "rows": lambda f, odd: f.comm.all_gather(f.make(np.ones((3 if odd else 2, 2)))),
    "root": lambda f, odd: f.comm.reduce(f.make(np.ones(2)), 1 if odd else 0),
    "type": lambda f, odd: f.comm.gather(f.make(np.ones(2, np.float64 if odd else np.int64))),
    "collective": lambda f, odd: (f.comm.allreduce if odd else f.comm.reduce)(f.make(np.ones(2)), name="same"),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_calls_that_differ_fail_everywhere_and_the_next_one_works(
    framework: Framework, mode: str, case: str, rank: int, size: int
) -> None:
    if size == 1 or (case == "collective" and mode != "eager"):  # which takes seconds
        return
    with framework.raises(dl_comm.MismatchError, mode=mode):
        framework.runner(lambda: DIFFERENT[case](framework, rank == size - 1), mode)()
    assert framework.comm.allreduce(1) == size


@pytest.mark.parametrize("again", [True, False])
def test_a_call_that_one_rank_refuses(framework: Framework, again: bool, rank: int, size: int) -> None:
    """It may make the call again; else those of the others fail with its error, and the next ones match."""
    if size == 1:
        return
    comm, x = framework.comm, framework.make(np.ones(3, np.float32))
    if rank == 0:
        with pytest.raises(dl_comm.ArgumentError, match="root"):
            comm.reduce(x, size)
    if again:
        comm.reduce(x, 0)
    elif rank > 0:
        with pytest.raises(dl_comm.MismatchError, match="rank 0: has refused its call: ArgumentError: .*root"):
            comm.reduce(x, 0)
    framework.check(comm.allreduce(x), np.full(3, size, np.float32))


def test_shapes_of_blocks_must_match(framework: Framework, rank: int, size: int) -> None:
    if size == 1:
        return
    comm = framework.comm
    x = framework.make(np.ones((2, 3) if rank == 0 else (3, 2)))
    blocks = framework.make(np.ones((2 * size, 3) if rank == 0 else (3 * size, 2)))
    calls = [(comm.allreduce, x), (comm.all_gather, x), (comm.reduce_scatter, blocks), (comm.all_to_all, blocks)]
    for call, given in calls:
        with pytest.raises(dl_comm.MismatchError, match="2, 3"):
            call(given)
    assert comm.allreduce(1) == size


@pytest.mark.parametrize("how", ["counts", "ragged"])
def test_blocks_of_different_lengths_have_equal_rows(framework: Framework, how: str, rank: int, size: int) -> None:
    """[4, 6] and [4, 2, 3] have equally many elements."""
    if size == 1:
        return
    comm, odd = framework.comm, rank == size - 1
    x = framework.make(np.ones((4, 2, 3) if odd else (4, 6)))
    blocks = framework.make(np.ones((4 * size, 2, 3) if odd else (4 * size, 6)))
    equal = [4] * size
    lengths: dict[str, Any] = {"counts": equal} if how == "counts" else {"ragged": True}
    calls: list[Callable[[], Any]] = [lambda: comm.all_gather(x, **lengths), lambda: comm.gather(x, 1, **lengths)]
    if how == "counts":
        calls += [lambda: comm.reduce_scatter(blocks, **lengths), lambda: comm.all_to_all(blocks, send_counts=equal)]
        calls += [lambda: comm.all_to_all(blocks, send_counts=equal, receive_counts=equal)]
    for call in calls:
        with pytest.raises(dl_comm.MismatchError):
            call()
    assert comm.allreduce(1) == size


def joined_sum(framework: Framework, tensors: list[Any]) -> Any:
    return tensors[0] + framework.sum(tensors[1])


# The linear functions of the gradient tests, of a matrix with 12 rows.
LINEAR: dict[str, Callable[[Framework, Any, int, int], Any]] = {
    "allreduce": lambda f, x, rank, size: f.comm.allreduce(x),
    "allreduce factors": lambda f, x, rank, size: f.comm.allreduce(x, prescale=3.0, postscale=0.25),
    "allreduce mean": lambda f, x, rank, size: f.comm.allreduce([x, f.sum(x)], "mean")[0],
    "allreduce mean factors": lambda f, x, rank, size: f.comm.allreduce(x, "mean", prescale=3.0, postscale=0.5),
    "reduce": lambda f, x, rank, size: f.comm.reduce(x, size - 1),
    "reduce mean": lambda f, x, rank, size: f.comm.reduce(x, 0, "mean"),
    "broadcast": lambda f, x, rank, size: f.broadcast(x, size - 1),
    "all_gather": lambda f, x, rank, size: f.comm.all_gather(x),
    "all_gather counts": lambda f, x, rank, size: f.comm.all_gather(x[: rank + 1], counts=range(1, size + 1)),
    "all_gather ragged": lambda f, x, rank, size: f.comm.all_gather(x[: rank + 1], ragged=True),
    "all_gather scalar": lambda f, x, rank, size: f.comm.all_gather(f.sum(x)),
    "gather": lambda f, x, rank, size: f.comm.gather(x, size - 1),
    "gather list": lambda f, x, rank, size: joined_sum(f, f.comm.gather([x, 2 * x[:1]])),
    "gather counts": lambda f, x, rank, size: f.comm.gather(x[: rank + 1], size - 1, counts=range(1, size + 1)),
    "gather ragged": lambda f, x, rank, size: f.comm.gather(x[: rank + 1], ragged=True),
    "scatter": lambda f, x, rank, size: f.comm.scatter(x, size - 1),
    "scatter counts": lambda f, x, rank, size: f.comm.scatter(x, 0, counts=[12, *[0] * (size - 1)]),
    "reduce_scatter": lambda f, x, rank, size: f.comm.reduce_scatter(x),
    "reduce_scatter factors": lambda f, x, rank, size: f.comm.reduce_scatter(x, prescale=3.0, postscale=0.5),
    "reduce_scatter mean": lambda f, x, rank, size: f.comm.reduce_scatter(x, "mean"),
    "reduce_scatter mean factors": lambda f, x, rank, size: f.comm.reduce_scatter(x, "mean", prescale=3.0),
    "reduce_scatter counts": lambda f, x, rank, size: f.comm.reduce_scatter(x, counts=[12, *[0] * (size - 1)]),
    "reduce_scatter mean counts": lambda f, x, rank, size: f.comm.reduce_scatter(
        x, "mean", counts=[12, *[0] * (size - 1)]
    ),
    "all_to_all": lambda f, x, rank, size: f.comm.all_to_all(x),
    "all_to_all list": lambda f, x, rank, size: joined_sum(f, f.comm.all_to_all([x, 3 * x[size:]])),
    "all_to_all counts": lambda f, x, rank, size: f.comm.all_to_all(
        x[: size * (rank + 1)], send_counts=[rank + 1] * size
    ),
}


@pytest.mark.needs("gradients")
@pytest.mark.modes("eager", "function")
@pytest.mark.parametrize("name", LINEAR)
def test_gradients_are_adjoint(framework: Framework, mode: str, name: str, rank: int, size: int) -> None:
    check_adjoint(framework, lambda x: LINEAR[name](framework, x, rank, size), mode, "float64", rank)
    if mode == "eager" and not name.endswith("factors"):  # which are for real numbers
        check_adjoint(framework, lambda x: LINEAR[name](framework, x, rank, size), mode, "complex128", rank)


@pytest.mark.needs("gradients")
def test_gradients_in_a_group(framework: Framework, mode: str, rank: int, size: int) -> None:
    """Of two ranks; the third one, if there is one, makes no call."""
    members = list(range(size))[-2:][::-1]
    if rank in members:
        comm = framework.comm
        with comm.Group(members) as group:
            for function in (
                lambda x: framework.broadcast(x, 0, group=group),
                lambda x: comm.reduce_scatter(x, group=group),
                lambda x: comm.gather(x, group=group),
            ):
                check_adjoint(framework, function, mode, "float64", rank, group)


def check_adjoint(
    framework: Framework, function: Callable[[Any], Any], mode: str, dtype: str, rank: int, group: Any = None
) -> None:
    """A linear function A and its gradient G are adjoint: over all ranks, <A x, v> = <x, G v>. G's gradient is A."""
    rng = np.random.default_rng(rank)

    def random(shape: Any) -> Any:
        numbers = rng.standard_normal((2, *shape))
        return numbers[0] if dtype == "float64" else numbers[0] + 1j * numbers[1]

    def inner(a: Any, b: Any) -> complex:
        return dl_comm.allreduce(complex((a * b.conj()).sum()), group=group)

    def run(x: Any, v: Any) -> list[Any]:
        y, gradient = framework.derivative(function, x, v)
        _, again = framework.derivative(lambda v: framework.derivative(function, x, v)[1], v, x)
        return [y, gradient, again]

    x = random((12, 2))
    v = random(framework.derivative(function, framework.make(x))[0].shape)
    y, gradient, again = framework.runner(run, mode)(x, v)
    assert inner(y, v) == pytest.approx(inner(x, gradient))
    same(again, y, tolerance=1e-12)


# Other differentiable functions, and what a binding must support.
CURVED: dict[str, tuple[str, Callable[[Framework, Any], Any]]] = {
    "allreduce max": ("gradients", lambda f, x: f.comm.allreduce(x, "max")),
    "allreduce min": ("gradients", lambda f, x: f.comm.allreduce(x, "min")),
    "allreduce product": ("gradient of product", lambda f, x: f.comm.allreduce(x, "product")),
    "reduce min": ("gradient of reduce min", lambda f, x: f.comm.reduce(x, 0, "min")),
    "reduce max": ("gradient of reduce min", lambda f, x: f.comm.reduce(x, 0, "max")),
    "reduce_scatter max": ("gradient of reduce min", lambda f, x: f.comm.reduce_scatter(x, "max")),
    "reduce product": ("", lambda f, x: f.comm.reduce(x, 0, "product")),
    "reduce_scatter product": ("", lambda f, x: f.comm.reduce_scatter(x, "product")),
    "allreduce adasum": ("", lambda f, x: f.comm.allreduce(x, "adasum")),
    "allreduce max with factors": ("", lambda f, x: f.comm.allreduce(x, "max", prescale=2.0)),
}


@pytest.mark.needs("gradients")
@pytest.mark.parametrize("name", CURVED)
def test_gradients_of_other_operators(framework: Framework, mode: str, name: str, rank: int, size: int) -> None:
    """Against differences of the sum of all ranks' losses, up to the second derivative; or there is none."""
    needs, function = CURVED[name]

    def curved(x: Any) -> Any:
        y = function(framework, x * x + x)
        return y * y

    def run(x: Any, v: Any, direction: Any) -> list[Any]:
        y, gradient = framework.derivative(curved, x, v)
        _, second = framework.derivative(lambda x: framework.derivative(curved, x, v)[1], x, direction)
        return [y, gradient, second]

    program = framework.runner(run, mode)
    x = np.random.default_rng(rank).permutation(4 * size).reshape(2 * size, 2) / (4 * size) + rank / 16 + 0.1
    if not (needs and framework.supports(needs)):
        with pytest.raises((dl_comm.ArgumentError, LookupError), match="has no gradient"):
            framework.runner(lambda x: framework.derivative(curved, x), mode)(x)
        return
    shape = framework.derivative(curved, framework.make(x))[0].shape
    v, direction = (np.random.default_rng(10 + rank).normal(size=each) for each in (shape, x.shape))
    step = 1e-5
    places = (x, x + step * direction, x - step * direction)
    (_, slope, second), (ahead, slope_ahead, _), (behind, slope_behind, _) = (
        program(at, v, direction) for at in places
    )
    difference = dl_comm.allreduce(float(((ahead - behind) * v).sum())) / (2 * step)
    assert dl_comm.allreduce(float((slope * direction).sum())) == pytest.approx(difference, rel=1e-5)
    same(second, (slope_ahead - slope_behind) / (2 * step), tolerance=1e-4)


@pytest.mark.needs("gradients")
def test_ties_share_the_gradient_of_a_maximum(framework: Framework, mode: str, rank: int, size: int) -> None:
    program = framework.runner(lambda x: framework.derivative(lambda x: framework.comm.allreduce(x, "max"), x), mode)
    _, gradient = program(np.array([1.0, rank]))
    same(gradient, np.array([1.0, size if rank == size - 1 else 0.0]))


@pytest.mark.needs("gradients")
def test_integers_have_no_gradient_and_are_not_in_the_way(framework: Framework, rank: int, size: int) -> None:
    def function(x: Any) -> Any:
        y, _ = framework.comm.allreduce([x, framework.make(np.array([rank]))])
        unused, z = framework.comm.all_gather([x, x * x])
        del unused
        return y + framework.sum(z)

    _, gradient = framework.derivative(function, framework.make(np.array([2.0])))
    framework.check(gradient, np.array([size + 4.0 * size]))


def test_large_results_use_memory_again(framework: Framework, rank: int, size: int) -> None:
    comm = framework.comm
    given = framework.make(np.full((3 << 10, 1 << 10), rank, np.float32))
    places = set()
    for step in range(6):
        results = [comm.gradients([given], 0)[0], comm.allreduce(given + step), comm.all_gather(given)]
        mean, total, joined = framework.arrays(results)
        assert (mean == (size - 1) / 2).all()
        assert (total == size * (size - 1) / 2 + size * step).all()
        assert (joined.reshape(size, -1) == np.arange(size)[:, None]).all()
        assert total.shape == given.shape
        assert total.flags.c_contiguous
        if step > 1:
            places |= {array.ctypes.data for array in (mean, total, joined)}
        del results, mean, total, joined
    if framework.uses_memory_again:
        assert len(places) <= 6, "three results are alive at once"
    # Results that stay, and views of them, are not used again.
    kept = [framework.array(comm.allreduce(given * step))[5] for step in range(4)]
    assert all((row == step * size * (size - 1) / 2).all() for step, row in enumerate(kept))
    assert comm.allreduce(framework.make(np.ones((1 << 20, 0)))).shape == (1 << 20, 0)


@pytest.mark.parametrize("cartesian", [None, False])
def test_an_allreduce_goes_through_a_span(
    framework: Framework, mode: str, cartesian: bool | None, rank: int, size: int
) -> None:
    if mode == "session" and size > 2:
        pytest.skip("a session leaves out the reduce of a tree's leaf, of which nobody uses the result")
    comm, total = framework.comm, sum(range(size))

    def values_of(x: Any, half: Any, integers: Any) -> list[Any]:
        return [
            comm.allreduce(x),
            comm.allreduce(half, "mean"),
            comm.allreduce(x, prescale=2.0, postscale=0.5),
            *comm.allreduce([integers, x]),
            comm.allreduce(integers, "max"),
        ]

    def squared(x: Any) -> Any:
        y = comm.allreduce(x)
        return (rank + 1) * (y * y)

    def gradients_of(x: Any, v: Any) -> list[Any]:
        _, gradient = framework.derivative(squared, x, v)
        _, second = framework.derivative(lambda x: framework.derivative(squared, x, v)[1], x, v)
        _, mixed = framework.derivative(lambda x: comm.allreduce([framework.make(np.array([rank])), x])[1], x, v)
        return [gradient, second, mixed]

    dl_comm.push_communicator(int(rank > 0), cartesian=cartesian)
    with dl_comm.collective_span(0, 1):
        found = framework.runner(values_of, mode)(np.full(5, rank + 1.0), np.full(3, 3e4, np.float16), np.full(3, rank))
        sums = np.full(5, float(total + size))
        expected = [sums, np.full(3, 3e4, np.float16), sums, np.full(3, total), sums, np.full(3, size - 1)]
        same(found, expected, tolerance=1e-12)
        if framework.supports("gradients"):
            found = framework.runner(gradients_of, mode)(np.full(5, rank + 1.0), np.ones(5))
            same(found, [2 * (total + size) * sums, 2 * size * sums, np.full(5, float(size))])
        x = framework.make(np.ones(2))
        for wrong in ((3, "mean"), (x, "adasum")):
            with pytest.raises(dl_comm.ArgumentError, match="flat"):
                comm.allreduce(*wrong)
        if framework.supports("out"):
            out = framework.make(np.full(2, float(rank)))
            assert comm.allreduce(out, out=out) is out
            framework.check(out, np.full(2, float(total)))
            framework.check(comm.allreduce(x, async_op=True).wait(), np.full(2, float(size)))
            with pytest.raises(dl_comm.ArgumentError, match="out"):
                comm.allreduce(x, out=framework.make(np.ones(4)))
    dl_comm.pop_communicator()


def test_calls_without_a_group_follow_the_communicators(framework: Framework, mode: str, rank: int, size: int) -> None:
    def program() -> Any:  # a graph keeps the communicator of its trace
        return framework.runner(lambda x: [framework.comm.allreduce(x)], mode)(np.ones(3))[0].tolist()

    dl_comm.push_communicator(rank % 2)
    with dl_comm.set_communicator(1):
        assert program() == [len(range(rank % 2, size, 2))] * 3
    assert program() == [size] * 3
    dl_comm.pop_communicator()
    assert program() == [size] * 3


@pytest.mark.needs("tensors")
@pytest.mark.parametrize(
    "name", ["allreduce", "reduce", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"]
)
def test_the_package_takes_tensors(framework: Framework, mode: str, name: str, rank: int, size: int) -> None:
    """Calls of `dl_comm` are those of the binding."""
    options = {"allreduce": {"op": "max"}, "gather": {"root": size - 1}, "reduce_scatter": {"postscale": 0.5}}

    def program(module: Any, x: Any) -> Any:
        return [getattr(module, name)(each, **options.get(name, {})) for each in (x, [x, 2 * x])]

    x = values(rank, (2 * size, 3))
    results = framework.runner(lambda x: [program(dl_comm, x), program(framework.comm, x)], mode)(x)
    same(*results)
