"""Arrays in memory that the ranks of a host see in each other, and averages in place, on 1, 2, 3 ranks."""

from __future__ import annotations

import gc
import os
import sys
import threading

import ml_dtypes
import numpy as np
import pytest
from numpy._core.multiarray import get_handler_name as handler

import dl_comm as mc

LONG = 300_000  # several chunks of any type


def values(rank: int, count: int, dtype: type) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(count).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("team", [0, 1])
def test_shared_memory_changes_no_bit(dtype: type, team: int, rank: int) -> None:
    given = [values(rank, count, dtype) for count in (LONG, 3, 0, 10_001)]
    expected = mc.gradients(given, team)
    shared = [mc.shared_zeros(array.shape, dtype) for array in given]
    for place, array in zip(shared, given, strict=True):
        place[...] = array
    result = mc.gradients(shared, team, out=shared)
    assert all(array is place for array, place in zip(result, shared, strict=True))
    assert all(place.tobytes() == array.tobytes() for place, array in zip(shared, expected, strict=True))


def test_ranks_whose_memory_is_of_different_kinds(rank: int, size: int) -> None:
    for odd in range(size):
        place = np.empty(LONG, np.float32) if rank == odd else mc.shared_zeros(LONG)
        place[:] = rank
        mc.gradients([place], 0, out=[place])
        assert (place == np.float32((size - 1) / 2)).all()
        # And where the mean goes elsewhere.
        out = [np.empty(LONG, np.float32)] if rank == odd else [place]
        mc.gradients([place], 0, out=out)
        assert (out[0] == place).all()


def test_parts_of_shared_arrays(rank: int, size: int) -> None:
    whole = mc.shared_zeros((4, LONG))
    whole[:] = rank
    mc.gradients([whole[1], whole[3]], 0, out=[whole[1], whole[3]])
    mean = np.float32((size - 1) / 2)
    assert (whole[1::2] == mean).all()
    assert (whole[::2] == rank).all()


def test_memory_is_given_back_and_starts_as_zeros(rank: int) -> None:
    for _ in range(3):
        array = mc.shared_zeros((1000, 1000), np.int32)
        assert array.flags.c_contiguous
        assert not array.any()
        row = array[5]
        array[:] = 7
        del array
        gc.collect()
        assert (row == 7).all(), "a view keeps it"
        del row
    assert len({mc.shared_zeros(16 << 20, np.uint8).ctypes.data for _ in range(5)}) == 1, "it is used again"


def test_shapes_and_types() -> None:
    assert mc.shared_zeros(3).shape == (3,)
    assert mc.shared_zeros((2, 0), np.float64).shape == (2, 0)
    assert mc.shared_zeros((), np.int8).shape == ()
    assert mc.shared_zeros([2, 3], ml_dtypes.bfloat16).dtype == ml_dtypes.bfloat16
    with pytest.raises(mc.ArgumentError, match="-1"):
        mc.shared_zeros((2, -1))
    with pytest.raises(mc.ArgumentError, match="object"):
        mc.shared_zeros(2, object)
    with pytest.raises(mc.CommError, match=r"KiB .*DL_COMM_SHM_DIR"):
        mc.shared_zeros(1 << 50, np.uint8)


def test_out_must_be_like_the_tensors(rank: int) -> None:
    two = [np.ones(3, np.float32), np.ones(4, np.float32)]
    for out in ([np.empty(3, np.float32)], [two, two], [np.empty(3, np.float32), np.empty(5, np.float32)]):
        with pytest.raises(ValueError, match="out|differ"):
            mc.gradients(two, 0, out=out)
    with pytest.raises(mc.DTypeError):
        mc.gradients(two, 0, out=two[0])
    towers = [[np.full(3, rank, np.float32)], [np.full(3, rank + 1, np.float32)]]
    (first,), (second,) = mc.gradients(towers, 0, out=towers)
    assert first is towers[0][0]
    assert second is towers[1][0]
    assert (first == second).all()


def test_new_arrays_in_shared_memory(rank: int, size: int) -> None:
    with mc.shared_memory():
        gradient = np.arange(LONG, dtype=np.float32) + rank
        grown = np.ones(LONG, np.float64)
        grown.resize(2 * LONG, refcheck=False)
        cleared, small = np.zeros(LONG, np.int64), np.ones(3)
        result = mc.gradients([gradient], 0)[0]
    outside = np.empty(LONG, np.float32)
    assert [handler(array) for array in (gradient, grown, cleared, small, result)] == ["dl_comm_shared"] * 5
    assert handler(outside) == "default_allocator"
    assert gradient.flags.owndata
    assert (grown[:LONG] == 1).all()
    assert not cleared.any()
    mean = np.arange(LONG, dtype=np.float32) + np.float32((size - 1) / 2)
    assert (result == mean).all()
    mc.gradients([gradient], 0, out=[gradient])
    assert (gradient == mean).all()
    # A forked child leaves the memory to its parent.
    child = os.fork()
    if child == 0:
        del result
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (result == mean).all()


def test_shared_memory_ends_with_its_context() -> None:
    with pytest.raises(KeyError), mc.shared_memory():
        raise KeyError
    assert handler(np.empty(LONG)) == "default_allocator"
    found: list[str] = []
    with mc.shared_memory():
        thread = threading.Thread(target=lambda: found.append(handler(np.empty(LONG))))
        thread.start()
        thread.join()
    if sys.version_info < (3, 14):  # Later threads may take over the context.
        assert found == ["default_allocator"]


def test_results_use_memory_again(rank: int, size: int) -> None:
    given = np.full(3 << 20, rank, np.float32)
    places = set()
    for step in range(6):
        result = mc.gradients([given], 0)[0]
        total = mc.allreduce(given + step)
        assert (result == (size - 1) / 2).all()
        assert (total == size * (size - 1) / 2 + size * step).all()
        assert result.flags.owndata
        places |= {result.ctypes.data, total.ctypes.data}
        del result, total
    assert len(places) <= 4, "two results are alive at once"
    # Results that stay are not used again, and may change in size.
    kept = [mc.gradients([given * step], 0)[0] for step in range(4)]
    kept[3].resize(1 << 20, refcheck=False)
    assert all((array == step * (size - 1) / 2).all() for step, array in enumerate(kept))
