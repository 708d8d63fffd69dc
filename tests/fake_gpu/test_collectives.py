"""Every collective on arrays of the fake GPU, against NumPy; run on 1, 2 and 3 ranks by test_device.py.

``PATH_EXPECTED`` names the path that the calls are to take. With ``nccl`` the tests also check which calls NCCL runs:
those that go through host memory enqueue copies. With ``ipc`` none do.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from itertools import accumulate, product

import numpy as np
import pytest
from arrays import Array, Stream, counters, use

import dl_comm
from device_calls import FLOAT32, DeviceWork
from dl_comm._base.cuda import preload
from dl_comm._base.table import SCALED as SCALED_OPERATORS

GPUS = int(os.environ.get("FAKE_CUDA_DEVICES", "1"))
MISMATCH = -4  # DL_COMM_ERROR_MISMATCH
ALLREDUCE, BROADCAST, REDUCE, ALLGATHER, GATHER, SCATTER, REDUCE_SCATTER, ALLTOALL = 1, 2, 4, 5, 6, 7, 8, 9
REDUCING, MOVING = (ALLREDUCE, REDUCE, REDUCE_SCATTER), (BROADCAST, ALLGATHER, GATHER, SCATTER, ALLTOALL)
ROOTED = (REDUCE, BROADCAST, GATHER, SCATTER)
SUM, MEAN, MIN, MAX, PRODUCT, BIT_AND, BIT_OR, BIT_XOR, SCALED = range(9)
UFUNCS = {SUM: np.add, MIN: np.minimum, MAX: np.maximum, PRODUCT: np.multiply}
UFUNCS |= {BIT_AND: np.bitwise_and, BIT_OR: np.bitwise_or, BIT_XOR: np.bitwise_xor}
# The codes of the C API.
DTYPES = {"f2": 0, "f4": 2, "f8": 3, "i1": 4, "u1": 5, "i4": 6, "i8": 7, "?": 8, "u2": 9, "u4": 10, "u8": 11, "i2": 12}
DTYPES |= {"c8": 13, "c16": 14}
NCCL_DTYPES = ("f2", "f4", "f8", "i1", "u1", "i4", "u4", "i8", "u8")


@pytest.fixture(scope="module", autouse=True)
def job() -> Iterator[None]:
    dl_comm.init()
    preload()
    use(dl_comm.local_rank() % GPUS)
    yield
    gpu = dl_comm.topology()["teams"][0]["gpu"]
    assert gpu["path"] == (os.environ["PATH_EXPECTED"] if dl_comm.size() > 1 else "single_rank")
    dl_comm.finalize()


def uses_nccl() -> bool:
    return dl_comm.size() > 1 and os.environ["PATH_EXPECTED"] == "nccl"


def uses_kernels() -> bool:
    return dl_comm.size() > 1 and os.environ["PATH_EXPECTED"] == "ipc"


def numbers(rank: int, length: int, dtype: str) -> np.ndarray:
    """Small numbers: sums and products of three ranks are exact in every type."""
    values = (np.arange(length) * 7 + 3 * rank) % 5 + 1
    return (values % 2 if dtype == "?" else values).astype(dtype)


def reduced(inputs: list[np.ndarray], operator: int) -> np.ndarray:
    if operator == MEAN:
        total = functools.reduce(np.add, [each.astype("c16" if each.dtype.kind == "c" else "f8") for each in inputs])
        mean = total / len(inputs)
        return (np.trunc(mean) if inputs[0].dtype.kind in "iu" else mean).astype(inputs[0].dtype)
    return functools.reduce(UFUNCS[operator], inputs).astype(inputs[0].dtype)


def input_length(collective: int, rank: int, lengths: list[int]) -> int:
    """Of an input of ``rank``, whose blocks have these lengths."""
    return sum(lengths) if collective in (SCATTER, REDUCE_SCATTER, ALLTOALL) else lengths[rank]


def result(collective: int, operator: int, root: int, lengths: list[int], dtype: str) -> np.ndarray | None:
    """What NumPy makes of the inputs of all ranks; None: this rank gets nothing."""
    rank, ranks = dl_comm.rank(), range(dl_comm.size())
    inputs = [numbers(other, input_length(collective, other, lengths), dtype) for other in ranks]
    if collective in (REDUCE, GATHER) and rank != root:
        return None
    starts = [0, *accumulate(lengths)]
    mine = slice(starts[rank], starts[rank + 1])
    match collective:
        case 1 | 4:
            return reduced(inputs, operator)
        case 2:
            return inputs[root]
        case 5 | 6:
            return np.concatenate(inputs)
        case 7:
            return inputs[root][mine]
        case 8:
            return reduced(inputs, operator)[mine]
    return np.concatenate([each[mine] for each in inputs])


def check(
    collective: int,
    lengths: list[int],
    dtype: str,
    *,
    operator: int = SUM,
    root: int = 0,
    ragged: bool = False,
    on_nccl: bool = True,
    blocks_host: bool = False,
) -> None:
    """Run a collective on one array on a slow stream, and compare all ranks' results with NumPy's.

    ``on_nccl``: whether NCCL has it; no copy between host and GPU is enqueued then.
    """
    rank, stream = dl_comm.rank(), Stream()
    expected = result(collective, operator, root, lengths, dtype)
    data = numbers(rank, input_length(collective, rank, lengths), dtype)
    most = max(sum(lengths), 1)
    given, got = Array(np.zeros_like(data), stream), Array(np.full(most, 9).astype(dtype), stream)
    stream.sleep(5)
    given.put(data)
    length = 0 if ragged else lengths[0]
    before = counters()[3]
    work = DeviceWork(
        collective,
        [(given.address.value, got.address.value, length, DTYPES[dtype])],
        (dl_comm.local_rank() % GPUS, stream.handle.value or 0),
        reduce=operator,
        root=root,
        send_counts=lengths if ragged else None,
        blocks_host=blocks_host,
        name=f"{collective} {operator} {root} {lengths} {dtype}",
    )
    assert work.wait() == 0
    copies = counters()[3] - before
    found = got.peek() if blocks_host else got.get()
    what = (collective, operator, root, lengths, dtype)
    untouched = np.full(most, 9).astype(dtype)
    size = 0 if expected is None else len(expected)
    if expected is not None:
        tolerance = {"f2": 2e-3, "f4": 1e-6, "f8": 1e-15}.get(dtype, 0)  # NCCL multiplies by 1/n
        np.testing.assert_allclose(found[:size], expected, rtol=tolerance if operator == MEAN else 0, err_msg=str(what))
    np.testing.assert_array_equal(found[size:], untouched[size:], err_msg=str(what))
    np.testing.assert_array_equal(given.get(), data, err_msg=str(what))
    if uses_nccl() and sum(lengths) > 0:
        if on_nccl:
            own_block = collective in (ALLTOALL, GATHER, SCATTER, ALLGATHER)
            assert copies <= own_block, what
        elif operator != SUM or dtype in ("c8", "c16"):
            assert copies > 0, what
    if uses_kernels() and sum(lengths) < 20_000:
        # Longer lists of items are copied.
        assert copies == 0, what
    given.free()
    got.free()


def ragged_lengths() -> list[int]:
    return [0 if rank == 1 else 1000 * rank + 7 for rank in range(dl_comm.size())]


@pytest.mark.parametrize("dtype", NCCL_DTYPES)
def test_reductions_of_every_operator_and_type(dtype: str) -> None:
    size = dl_comm.size()
    for operator in (SUM, MEAN, MIN, MAX, PRODUCT):
        on_nccl = operator != MEAN or dtype[0] == "f"
        for collective in REDUCING:
            for root in range(size) if collective == REDUCE else [0]:
                for length in (1, 4001):
                    kept = {"operator": operator, "root": root, "on_nccl": on_nccl, "blocks_host": length == 1}
                    check(collective, [length] * size, dtype, **kept)
        check(REDUCE_SCATTER, ragged_lengths(), dtype, operator=operator, ragged=True, on_nccl=on_nccl)


@pytest.mark.parametrize("dtype", ["f2", "?", "u2", "f4", "i8", "c16"])
def test_moves_of_every_type_and_root(dtype: str) -> None:
    size = dl_comm.size()
    for collective in MOVING:
        for root in range(size) if collective in ROOTED else [0]:
            for length in (1, 4001):
                check(collective, [length] * size, dtype, root=root, blocks_host=length == 1)
            if collective in (ALLGATHER, GATHER, SCATTER):
                check(collective, ragged_lengths(), dtype, root=root, ragged=True)
                check(collective, [5] * size, dtype, root=root, ragged=True)
                check(collective, [0] * size, dtype, root=root, ragged=True)


def test_long_blocks() -> None:
    size = dl_comm.size()
    for collective in (*REDUCING, *MOVING):
        check(collective, [300_001] * size, "f4", root=size - 1)
    if not uses_kernels():
        return
    # Several rounds, in which the buffers are used again.
    for collective in (REDUCE, REDUCE_SCATTER, ALLGATHER, GATHER, SCATTER, ALLTOALL):
        check(collective, [2_500_001] * size, "f4", root=size - 1)
    check(GATHER, [0 if rank == 1 else 2_500_001 * rank + 7 for rank in range(size)], "f4", ragged=True)


def test_operators_and_types_that_nccl_lacks_go_through_the_host() -> None:
    lengths = [100] * dl_comm.size()
    for collective in REDUCING:
        for operator in (BIT_AND, BIT_OR, BIT_XOR):
            for dtype in ("i4", "u1", "?"):
                check(collective, lengths, dtype, operator=operator, on_nccl=False)
        for dtype in ("i2", "u2", "c8", "c16"):
            check(collective, lengths, dtype, on_nccl=False)
        for dtype in ("i4", "u8", "c8"):
            check(collective, lengths, dtype, operator=MEAN, on_nccl=False)


def place() -> tuple[int, int]:
    """The GPU and the default stream."""
    return (dl_comm.local_rank() % GPUS, 0)


@pytest.mark.parametrize("blocks_host", [False, True])
def test_started_calls_on_the_same_memory_take_effect_in_their_order(blocks_host: bool) -> None:
    """A long call, a short one on its end, and one that goes through host memory unless NCCL has it."""
    size, stream = dl_comm.size(), Stream()
    long, short = 300_001, 8
    for _ in range(5):
        x, y = Array(np.ones(long, "f4"), stream), Array(np.zeros(short * size, "f4"), stream)
        end = x.address.value + 4 * (long - short)
        kept = {"device": (place()[0], stream.handle.value or 0), "blocks_host": blocks_host}
        works = [
            DeviceWork(ALLREDUCE, [(x.address.value, x.address.value, long, FLOAT32)], name="long", **kept),
            DeviceWork(ALLREDUCE, [(end, end, short, FLOAT32)], name="short", **kept),
            DeviceWork(ALLGATHER, [(end, y.address.value, short, FLOAT32)], name="gather", **kept),
            DeviceWork(ALLREDUCE, [(end, end, short, FLOAT32)], name="last", **kept),
        ]
        assert [work.wait() for work in works] == [0] * 4
        found = x.get()
        np.testing.assert_array_equal(found[:-short], size)
        np.testing.assert_array_equal(found[-short:], size**3)
        np.testing.assert_array_equal(y.get(), size**2)
        x.free()
        y.free()


def test_bfloat16() -> None:
    """Its numbers are the upper halves of those of float32."""
    rank, size = dl_comm.rank(), dl_comm.size()

    def halves(values: np.ndarray) -> np.ndarray:
        return (values.astype("f4").view("u4") >> 16).astype("u2")

    for operator in (SUM, MAX, PRODUCT, MEAN):
        given = Array(halves(numbers(rank, 1001, "f4")))
        lists = [(given.address.value, given.address.value, 1001, 1)]
        assert DeviceWork(ALLREDUCE, lists, place(), reduce=operator).wait() == 0
        found = (given.get().astype("u4") << 16).view("f4")
        expected = reduced([numbers(other, 1001, "f4") for other in range(size)], operator)
        np.testing.assert_allclose(found, expected, rtol=1e-2 if operator == MEAN else 0)
        given.free()


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("factors", [(0.5, 1.0), (0.1, 1.0), (1.0, 0.25), (2.0, 0.5)])
def test_scaled_sums(dtype: str, factors: tuple[float, float]) -> None:
    rank, size = dl_comm.rank(), dl_comm.size()
    for length in (3, 4001):
        arrays = [Array(numbers(rank, length + i, dtype)) for i in range(3)]
        lists = [(each.address.value, each.address.value, len(each.host), DTYPES[dtype]) for each in arrays]
        before = counters()[3]
        assert DeviceWork(ALLREDUCE, lists, place(), reduce=SCALED, factors=factors).wait() == 0
        exact = dtype != "f2" or factors[0] == 0.5
        assert not uses_nccl() or (counters()[3] == before) == (exact and factors[1] == 1)
        for i, array in enumerate(arrays):
            total = sum(numbers(other, length + i, dtype).astype("f8") for other in range(size))
            expected = total * factors[0] * factors[1]
            np.testing.assert_allclose(array.get(), expected, rtol={"f2": 2e-3, "f4": 1e-6, "f8": 1e-15}[dtype])
            array.free()


def test_float64_accumulators_go_through_the_host() -> None:
    rank, size, team = dl_comm.rank(), dl_comm.size(), 1
    dl_comm.create_team(team, prec_level=1)
    for operator, on_nccl in ((SUM, False), (MAX, True)):
        given = Array(numbers(rank, 100 * size, "f4"))
        got = Array(np.zeros(100, "f4"))
        lists = [(given.address.value, got.address.value, 100, DTYPES["f4"])]
        before = counters()[3]
        assert DeviceWork(REDUCE_SCATTER, lists, place(), reduce=operator, team=team).wait() == 0
        assert not uses_nccl() or (counters()[3] == before) == on_nccl
        expected = reduced([numbers(other, 100 * size, "f4") for other in range(size)], operator)
        np.testing.assert_array_equal(got.get(), expected[100 * rank : 100 * (rank + 1)])
        given.free()
        got.free()


@pytest.mark.parametrize("length", [10, 70_000, 2_500_000])
def test_in_place(length: int) -> None:
    """The input, or this rank's block of the longer side, is the output."""
    rank, size, root, step = dl_comm.rank(), dl_comm.size(), dl_comm.size() - 1, 4 * length
    for collective in (ALLREDUCE, REDUCE, BROADCAST, ALLGATHER, GATHER, SCATTER, REDUCE_SCATTER):
        expected = result(collective, SUM, root, [length] * size, "f4")
        data = numbers(rank, input_length(collective, rank, [length] * size), "f4")
        offset = step * rank
        if collective in (ALLGATHER, GATHER):
            whole = np.zeros(size * length, "f4")
            whole[rank * length : (rank + 1) * length] = data
            array = Array(whole)
            source, target = array.address.value + offset, array.address.value
        else:
            array = Array(data)
            source = array.address.value
            target = source + (offset if collective in (SCATTER, REDUCE_SCATTER) else 0)
        before = counters()[3]
        assert DeviceWork(collective, [(source, target, length, 2)], place(), root=root).wait() == 0
        assert not uses_nccl() or counters()[3] == before, "its own block stays where it is"
        if expected is not None:
            start = (target - array.address.value) // 4
            np.testing.assert_array_equal(array.get()[start : start + len(expected)], expected, err_msg=str(collective))
        array.free()


@pytest.mark.parametrize("collective", [*REDUCING, *MOVING])
def test_lists_of_arrays(collective: int) -> None:
    """Short arrays of several types, more than NCCL gets one by one, and a long one."""
    rank, size = dl_comm.rank(), dl_comm.size()
    shapes = [(3 * i + 1, ("f4", "f2", "i4", "f8")[i % 4]) for i in range(14)] + [(100_000, "f4")]
    for root in range(size):
        stream, lists, arrays = Stream(), [], []
        for length, dtype in shapes:
            data = numbers(rank, input_length(collective, rank, [length] * size), dtype)
            given, got = Array(data, stream), Array(np.full(size * length, 9, dtype), stream)
            lists.append((given.address.value, got.address.value, length, DTYPES[dtype]))
            arrays.append((given, got, result(collective, SUM, root, [length] * size, dtype)))
        device = (dl_comm.local_rank() % GPUS, stream.handle.value or 0)
        assert DeviceWork(collective, lists, device, root=root).wait() == 0
        for given, got, expected in arrays:
            found = got.get()
            if expected is not None:
                np.testing.assert_array_equal(found[: len(expected)], expected)
            else:
                assert (found == 9).all()
            given.free()
            got.free()


@pytest.mark.parametrize("length", [100, 1_000_000])
def test_long_calls_in_flight(length: int) -> None:
    """Sums of integers go through the host. Of long calls, each chunk there has several chunks of the group."""
    rank, size, stream, team = dl_comm.rank(), dl_comm.size(), Stream(), 7
    if team not in dl_comm.stats()["teams"]:
        dl_comm.create_team(team, 2)
    works, arrays, device = [], [], (dl_comm.local_rank() % GPUS, stream.handle.value or 0)
    for step in range(8):
        stream.sleep(3)
        given, got = Array(numbers(rank + step, length, "i4"), stream), Array(np.zeros(length, "i4"), stream)
        arrays.append((given, got))
        lists, name = [(given.address.value, got.address.value, length, DTYPES["i4"])], f"flight {length} {step}"
        works.append(DeviceWork(ALLREDUCE, lists, device, team=team, name=name))
    for step, (work, (given, got)) in enumerate(zip(works, arrays, strict=True)):
        assert work.wait() == 0
        expected = functools.reduce(np.add, [numbers(other + step, length, "i4") for other in range(size)])
        np.testing.assert_array_equal(got.get(), expected, err_msg=str(step))
        given.free()
        got.free()


def operators(dtype: str) -> list[int]:
    """Those that the type has."""
    kind = np.dtype(dtype).kind
    bits, ordered = [BIT_AND, BIT_OR, BIT_XOR], [SUM, MEAN, MIN, MAX, PRODUCT]
    return {"b": bits, "c": [SUM, MEAN], "f": ordered}.get(kind, [*ordered, *bits])


def any_values(dtype: str, length: int) -> np.ndarray:
    """Any values of integers, also those whose sums and products wrap around; NaN, infinities and zeros of floats."""
    random = np.random.default_rng(dl_comm.rank())
    kind = np.dtype(dtype).kind
    if kind == "b":
        return random.integers(0, 2, length).astype(dtype)
    if kind in "iu":
        return random.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, length, dtype, endpoint=True)
    values = random.standard_normal(length * (2 if kind == "c" else 1)).astype(
        {"c8": "f4", "c16": "f8"}.get(dtype, dtype)
    )
    if kind == "f":
        special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0], dtype)
        values[::5] = special[random.integers(0, len(special), len(values[::5]))]
    return values.view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions_have_the_bits_of_those_in_host_memory(dtype: str) -> None:
    """By kernels, if not by NCCL: no data is copied to the host. The sign and the payload of a NaN may differ."""
    names = ("sum", "mean", "min", "max", "product", "bit_and", "bit_or", "bit_xor")
    for operator in operators(dtype):
        for length in (1, 7001, 70_001):
            data = any_values(dtype, length)
            with np.errstate(all="ignore"):
                expected = dl_comm.allreduce(data, names[operator])
            array, before = Array(data), counters()[3]
            lists = [(array.address.value, array.address.value, length, DTYPES[dtype])]
            work = DeviceWork(ALLREDUCE, lists, place(), reduce=operator, name=f"{operator} {dtype} {length}")
            assert work.wait() == 0
            copies, found = counters()[3] - before, array.get()
            if uses_kernels() and length < 20_000:
                assert copies == 0, (operator, length)
            if not uses_nccl():
                np.testing.assert_array_equal(found, expected, err_msg=f"{operator} {length}")
                if operator in (MIN, MAX):
                    assert found.tobytes() == expected.tobytes(), (operator, length)
            array.free()


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != "?"])
def test_factors_have_the_effect_that_they_have_in_host_memory(dtype: str) -> None:
    # The others take integers to the limits of elements and accumulators.
    for factors, (op, operator) in product([(0.3, 1.7), (-3e18, 1e-9)], SCALED_OPERATORS.items()):
        if np.dtype(dtype).kind == "c" and op not in ("sum", "mean"):
            continue
        data = any_values(dtype, 7001)
        with np.errstate(all="ignore"):
            expected = dl_comm.allreduce(data, op, prescale=factors[0], postscale=factors[1])
        array, before = Array(data), counters()[3]
        lists = [(array.address.value, array.address.value, len(data), DTYPES[dtype])]
        work = DeviceWork(ALLREDUCE, lists, place(), reduce=operator, factors=factors, name=f"{op} {dtype} {factors}")
        assert work.wait() == 0
        copies, found = counters()[3] - before, array.get()
        if uses_kernels():
            assert copies == 0, op
        tolerance = {"f2": 1e-2, "f4": 1e-5, "f8": 1e-14}.get(dtype, 0) if uses_nccl() and op == "sum" else 0
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance, err_msg=op)
        array.free()


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("length", [100, 70_001])
def test_sums_have_the_bits_of_those_in_host_memory(dtype: str, length: int) -> None:
    """Between GPUs by kernels: no data is copied to the host."""
    random = np.random.default_rng(dl_comm.rank()).standard_normal(length).astype(dtype)
    expected, array = dl_comm.allreduce(random), Array(random)
    before = counters()[3]
    lists = [(array.address.value, array.address.value, length, DTYPES[dtype])]
    assert DeviceWork(ALLREDUCE, lists, place(), name=f"sum {dtype} {length}").wait() == 0
    copies, found = counters()[3] - before, array.get()
    if uses_nccl():
        np.testing.assert_allclose(found, expected, rtol=1e-2 if dtype == "f2" else 1e-5, atol=1e-2)
    else:
        np.testing.assert_array_equal(found, expected)
    if os.environ["PATH_EXPECTED"] == "ipc":
        assert copies == 0
    array.free()


def test_an_all_to_all_of_pairs() -> None:
    """Rank r sends r + 2 s + 1 elements to rank s, none to its left neighbour."""
    rank, size = dl_comm.rank(), dl_comm.size()

    def count(sender: int, receiver: int) -> int:
        return 0 if size > 1 and (receiver + 1) % size == sender else 500 * (sender + 2 * receiver + 1)

    send, receive = [count(rank, other) for other in range(size)], [count(other, rank) for other in range(size)]
    for _ in range(2):
        given = Array(np.concatenate([np.full(length, 10 * rank + to, "i4") for to, length in enumerate(send)]))
        got = Array(np.full(max(sum(receive), 1), -1, "i4"))
        lists = [(given.address.value, got.address.value, 0, DTYPES["i4"])]
        assert DeviceWork(ALLTOALL, lists, place(), send_counts=send, receive_counts=receive).wait() == 0
        parts = [np.full(length, 10 * other + rank, "i4") for other, length in enumerate(receive)]
        np.testing.assert_array_equal(got.get()[: sum(receive)], np.concatenate(parts))
        given.free()
        got.free()


def test_pairs_of_equal_lengths_match_an_all_to_all_without_lengths() -> None:
    rank, size, length = dl_comm.rank(), dl_comm.size(), 300
    given, got = Array(numbers(rank, size * length, "f4")), Array(np.zeros(size * length, "f4"))
    addresses = (given.address.value, got.address.value)
    for _ in range(2):
        if rank == 0:
            counts = [length] * size
            options = {"send_counts": counts, "receive_counts": counts}
            work = DeviceWork(ALLTOALL, [(*addresses, 0, 2)], place(), **options)
        else:
            work = DeviceWork(ALLTOALL, [(*addresses, length, 2)], place())
        assert work.wait() == 0
        np.testing.assert_array_equal(got.get(), result(ALLTOALL, SUM, 0, [length] * size, "f4"))
    given.free()
    got.free()


def test_many_calls_in_flight() -> None:
    size, rank, stream = dl_comm.size(), dl_comm.rank(), Stream()
    device = (dl_comm.local_rank() % GPUS, stream.handle.value or 0)
    started = []
    stream.sleep(50)
    for number in range(24):
        collective, length = (*REDUCING, *MOVING)[number % 8], 100 + 3000 * (number % 3)
        given = Array(numbers(rank, input_length(collective, rank, [length] * size), "f4"), stream)
        got = Array(np.zeros(size * length, "f4"), stream)
        lists = [(given.address.value, got.address.value, length, 2)]
        work = DeviceWork(collective, lists, device, name=f"call {number}")
        started.append((work, given, got, result(collective, SUM, 0, [length] * size, "f4")))
    for work, _, got, expected in reversed(started):
        assert work.wait() == 0
        if expected is not None:
            np.testing.assert_array_equal(got.get()[: len(expected)], expected)
    for _, given, got, _ in started:
        given.free()
        got.free()


@pytest.mark.skipif("dl_comm.size() == 1")
def test_calls_that_differ_fail_on_all_ranks_and_later_ones_work() -> None:
    rank, size = dl_comm.rank(), dl_comm.size()
    given, got = Array(numbers(rank, 100 * size, "f4")), Array(np.full(100 * size, 9, "f4"))
    addresses = (given.address.value, got.address.value)

    def refused(collective: int, length: int, **options: object) -> None:
        work = DeviceWork(collective, [(*addresses, length, 2)], place(), name="odd", **options)  # type: ignore[arg-type]
        assert work.wait() == MISMATCH
        assert (got.get() == 9).all()

    refused(ALLGATHER, 10 + rank)
    refused(GATHER, 10, root=int(rank == 0))
    refused(REDUCE_SCATTER, 10, reduce=(SUM, MAX)[rank == 0])
    refused(ALLTOALL if rank == 0 else ALLGATHER, 10)
    # Rank 0 sends an element more than the others expect.
    counts = [10] * size
    more = [11] * size if rank == 0 else counts
    refused(ALLTOALL, 0, send_counts=more, receive_counts=counts)
    # One rank's tensor is in host memory.
    if rank == 0:
        with pytest.raises(dl_comm.MismatchError, match="on a GPU"):
            dl_comm.all_gather(np.ones(10, "f4"), name="odd")
    else:
        refused(ALLGATHER, 10)
    for collective in (ALLGATHER, ALLTOALL, REDUCE_SCATTER):
        check(collective, [100] * size, "f4")
