"""The memory of NumPy arrays: shared by the ranks of a host, or used again for results."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from dl_comm import _dl_comm
from dl_comm._base.checks import checked_ints
from dl_comm._base.errors import ArgumentError, StateError

# Smaller results come from NumPy's allocator, which is faster for them.
_LARGE_BYTES = 1 << 20


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
    is_length = isinstance(shape, (int, np.integer))
    extents = checked_ints("shape", (shape,) if is_length else shape, 0, 2**62)
    try:
        kind = np.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"invalid dtype: {dtype!r} (expected a NumPy element type)") from error
    if kind.hasobject or not kind.itemsize:
        raise ArgumentError(f"an array of type {kind} cannot be shared")
    size = math.prod(extents) * kind.itemsize
    if size >= 2**63:
        raise ArgumentError(f"an array of shape {tuple(extents)} and type {kind} is longer than memory can be")
    return np.asarray(_Block(size))[:size].view(kind).reshape(extents)


@contextmanager
def shared_memory() -> Iterator[None]:
    """In a ``with`` statement: new NumPy arrays lie in memory that all ranks of the host share.

    Holds for arrays of at least 4 KiB that NumPy makes in this context: by ``zeros``, arithmetic, ``copy``, ``astype``,
    random generators, ``load``, and as results of dl_comm. Their memory stays shared until they are freed, also after
    the ``with`` statement. Once shared memory is used up, arrays get ordinary memory. Not for arrays that other
    libraries make, of ``frombuffer`` or unpickled ones. Not collective. `shared_zeros` says what it gains.

    A forked child that writes to such an array writes to that of its parent: do not use it where data loaders fork
    and write. Making and freeing an array takes longer than with ordinary memory: make arrays that live long, such as
    parameters and gradients, not temporary ones.

    Thread rule: holds in the current context of ``contextvars``. Threads that are started in the statement do not take
    it over before Python 3.14; tasks of asyncio do.

    Source: NEP 49, "Data allocation strategies" of NumPy.

    Raises:
        StateError: ``init`` or ``init_mpi`` was not called, or ``finalize`` was.
    """
    if json.loads(_dl_comm.describe())["state"] != "started":
        raise StateError("shared_memory() needs the ranks of the host: call init first, and finalize after it")
    before = _dl_comm.set_memory_handler(_dl_comm.shared_handler())
    try:
        yield
    finally:
        _dl_comm.set_memory_handler(before)


def new_result(shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
    """As ``numpy.empty``. A large result gets memory of results that have been freed."""
    kind = np.dtype(dtype)
    if math.prod(shape) * kind.itemsize < _LARGE_BYTES:
        return np.empty(shape, kind)
    return _dl_comm.empty_result(shape, kind)


def new_result_like(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """As ``numpy.empty_like`` without subclasses. Memory as in `new_result`."""
    if array.nbytes < _LARGE_BYTES or not array.flags.c_contiguous:
        return np.empty_like(array, subok=False)
    return _dl_comm.empty_result(array.shape, array.dtype)
