"""Ranks without more data, on arrays of the fake GPU; run on 1, 2 and 3 ranks by test_device.py."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import numpy as np
import pytest
from arrays import Array, Stream, use

import dl_comm
from device_calls import DeviceWork
from dl_comm._base.cuda import preload

GPUS = int(os.environ.get("FAKE_CUDA_DEVICES", "1"))
ALLREDUCE, ALLGATHER = 1, 5
SUM, MEAN, MAX, SCALED = 0, 1, 3, 8
MISMATCH = -4  # DL_COMM_ERROR_MISMATCH


@pytest.fixture(scope="module", autouse=True)
def job() -> Iterator[None]:
    dl_comm.init(nteams=2)
    preload()
    use(dl_comm.local_rank() % GPUS)
    yield
    dl_comm.finalize()


def mean_of(array: Array, ranks: int, value: float) -> None:
    """A call of ``ranks`` ranks with this value; the others contribute zeros."""
    array.put(np.full(array.host.shape, value, array.host.dtype))
    dl_comm.gradients([array], out=[array])
    np.testing.assert_allclose(array.get(), value * ranks / dl_comm.size(), rtol=1e-6)


def allreduce(array: Array, operator: int, blocks_host: bool = False, **options: object) -> int:
    """Starts it on the array in place, and waits for its end."""
    lists = [(array.address.value, array.address.value, array.host.size, 2)]
    device = (dl_comm.local_rank() % GPUS, array.stream.handle.value if array.stream else 0)
    work = DeviceWork(ALLREDUCE, lists, device, reduce=operator, blocks_host=blocks_host, **options)  # type: ignore[arg-type]
    return work.wait()


def test_ranks_join_before_the_path_is_chosen() -> None:
    """Rank r has r + 1 batches."""
    rank, size = dl_comm.rank(), dl_comm.size()
    array = Array(np.zeros(1000, "f4"), Stream())
    for step in range(rank + 1):
        mean_of(array, size - step, 6.0)
    assert dl_comm.join() == size - 1
    mean_of(array, size, 3.0)
    array.free()


@pytest.mark.parametrize("length", [1, 1000, 300_001])
def test_sums_and_means_while_a_rank_has_joined(length: int) -> None:
    rank, size = dl_comm.rank(), dl_comm.size()
    array = Array(np.zeros(length, "f4"), Stream())
    mean_of(array, size, 2.0)
    if rank > 0:
        others = size - 1
        for step in range(5):
            array.stream.sleep(20)
            mean_of(array, others, 1.0 + step)
        for operator, factors, expected in (
            (SUM, (1.0, 1.0), 3.0 * others),
            (MEAN, (1.0, 1.0), 3.0 * others / size),
            (SCALED, (0.5, 1.0), 1.5 * others),
        ):
            for blocks_host in (False, True):
                array.put(np.full(length, 3, "f4"))
                assert allreduce(array, operator, blocks_host, factors=factors) == 0
                found = array.peek() if blocks_host else array.get()
                np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert dl_comm.join() in ({0} if size == 1 else {*range(1, size)}), "rank 0 has joined first"
    for _ in range(3):
        mean_of(array, size, 5.0)
    array.free()


def test_lists_and_calls_in_another_order() -> None:
    rank, size = dl_comm.rank(), dl_comm.size()
    shapes = [(7,), (3, 5), (), (200_000,)]
    if rank > 0:
        stream = Stream()
        arrays = [Array(np.full(shape, rank, ("f4", "f8", "i4", "f2")[i]), stream) for i, shape in enumerate(shapes)]
        dl_comm.gradients(arrays, out=arrays)
        total = sum(range(1, size))
        for array in arrays:
            expected = np.trunc(total / size) if array.host.dtype.kind == "i" else total / size
            np.testing.assert_allclose(array.get(), expected, rtol=2e-3)
        # Several in flight, of which the ranks submit the same in another order.
        numbers = range(4) if rank == 1 else reversed(range(4))
        pending = []
        for number in numbers:
            array = Array(np.full(50 + number, number, "f4"), stream)
            lists = [(array.address.value, array.address.value, 50 + number, 2)]
            device = (dl_comm.local_rank() % GPUS, stream.handle.value or 0)
            pending.append((number, array, DeviceWork(ALLREDUCE, lists, device, name=f"number {number}")))
        for number, array, work in pending:
            assert work.wait() == 0
            np.testing.assert_allclose(array.get(), number * (size - 1))
        # Host memory takes part as before.
        np.testing.assert_allclose(dl_comm.gradients([np.full(9, 4.0)])[0], 4 * (size - 1) / size)
    dl_comm.join()


@pytest.mark.skipif("dl_comm.size() == 1")
def test_other_calls_fail_and_later_ones_work() -> None:
    rank, size = dl_comm.rank(), dl_comm.size()
    array = Array(np.full(size * 10, rank, "f4"), Stream())
    if rank > 0:
        time.sleep(0.1)  # rank 0 joins
        assert allreduce(array, MAX) == MISMATCH
        lists = [(array.address.value + 40 * rank, array.address.value, 10, 2)]
        device = (dl_comm.local_rank() % GPUS, array.stream.handle.value or 0)
        assert DeviceWork(ALLGATHER, lists, device).wait() == MISMATCH
        with pytest.raises(dl_comm.MismatchError, match="has joined, and takes part in sums and means only"):
            dl_comm.broadcast([array], 1)
        assert (array.get() == rank).all()
        mean_of(array, size - 1, 1.0)
    dl_comm.join()
    mean_of(array, size, 2.0)
    array.free()


def test_teams_beside_the_first() -> None:
    rank, size = dl_comm.rank(), dl_comm.size()
    arrays = [Array(np.zeros(500, "f4"), Stream()) for _ in range(2)]
    for _ in range(rank * 2):
        for team, array in enumerate(arrays):
            array.put(np.full(500, rank + team, "f4"))
            dl_comm.gradients([array], team, out=[array])
    assert dl_comm.join() == size - 1
    for array in arrays:
        array.free()
