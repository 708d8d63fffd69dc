"""NumPy arrays in memory that the ranks of a host share."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dl_comm import _dl_comm
from dl_comm._errors import ArgumentError


class _Block:
    """Shared memory, freed with the last array in it."""

    def __init__(self, size: int) -> None:
        self._owner = os.getpid()
        self._address = 0
        self._address = _dl_comm.alloc(size)
        # Read by numpy.asarray; its arrays keep this object alive.
        self.__array_interface__ = {"version": 3, "shape": (size,), "typestr": "|u1", "data": (self._address, False)}

    def __del__(self) -> None:
        # A forked child shares the block with its parent, which still uses it.
        if self._address and os.getpid() == self._owner:
            _dl_comm.free(self._address)


def shared_zeros(shape: int | Sequence[int], dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
    """An array of zeros in memory that all ranks of the host share.

    On one host, an allreduce in place (``gradients(arrays, out=arrays)``) makes no copies if all arrays of all ranks
    are in this memory: each rank reads its shard of all ranks' arrays and writes the mean to them. In all other calls
    it is an ordinary array. Not collective.

    Args:
        shape: The extents, or the number of elements.
        dtype: Any NumPy element type except object.

    Returns:
        A C-contiguous array. It stays valid after ``finalize``; its memory is freed with its last view.

    Raises:
        ArgumentError: The shape has a negative extent, or the element type is object.
        CommError: The file system of ``DL_COMM_SHM_DIR`` is full, or there is no shared memory.
        StateError: ``init`` or ``init_mpi`` was not called, or ``finalize`` was.
    """
    extents = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    kind = np.dtype(dtype)
    if kind.hasobject or any(extent < 0 for extent in extents):
        raise ArgumentError(f"an array of shape {extents} and type {kind} cannot be shared")
    size = math.prod(extents) * kind.itemsize
    return np.asarray(_Block(size))[:size].view(kind).reshape(extents)
