"""What only NumPy arrays have in the collectives: scalars of NumPy, strides and masks that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dl_comm


def test_scalars_keep_their_types(rank: int, size: int) -> None:
    for kind in (np.float32, np.int16, np.complex64):
        found = dl_comm.allreduce(kind(rank))
        assert isinstance(found, kind)
        assert found == size * (size - 1) // 2


@pytest.mark.parametrize(
    "array", [np.ones((4, 4))[:, ::2], np.ones((4, 3)).T, np.ones(8)[::2]], ids=["cut", "T", "step"]
)
def test_strides_are_refused(array: Any, rank: int, size: int) -> None:
    for call in (
        dl_comm.allreduce,
        dl_comm.reduce,
        dl_comm.all_gather,
        dl_comm.gather,
        lambda array: dl_comm.broadcast([array], group=dl_comm.Group()),
        lambda array: dl_comm.send(array, rank),
        lambda array: dl_comm.allreduce(array.copy(), out=array),
    ):
        with pytest.raises(dl_comm.ArgumentError, match="C-contiguous"):
            call(array)
    assert dl_comm.allreduce(1) == size


def test_masks_are_refused(rank: int, size: int) -> None:
    masked = np.ma.masked_array([1.0], [True])
    for call in (dl_comm.allreduce, dl_comm.all_gather, lambda array: dl_comm.allreduce([np.ones(1), array])):
        with pytest.raises(dl_comm.ArgumentError, match="masked"):
            call(masked)
    assert dl_comm.allreduce(1) == size


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("dtype", ["int16", "uint16", "uint32", "uint64", "complex64", "complex128", "bool", "float16"])
def test_a_broadcast_in_place_takes_every_type(dtype: str, grouped: bool, rank: int, size: int) -> None:
    array = np.full(3, rank + 1, dtype)
    with dl_comm.Group() as group:
        assert dl_comm.broadcast([array], size - 1, group=group if grouped else None)[0] is array
    np.testing.assert_array_equal(array, np.full(3, size, dtype))
