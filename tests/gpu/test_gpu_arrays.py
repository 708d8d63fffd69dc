"""Arrays of CuPy and Numba in GPU memory, on any number of ranks, if these are installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dl_comm as mc
from job import Job


def cupy(values: np.ndarray) -> Any:
    """A CuPy array."""
    return pytest.importorskip("cupy").asarray(values)


def numba(values: np.ndarray) -> Any:
    """An array of Numba."""
    return pytest.importorskip("numba.cuda").to_device(values)


LIBRARIES: dict[str, Callable[[np.ndarray], Any]] = {"cupy": cupy, "numba": numba}


def to_host(array: Any) -> np.ndarray:
    """A copy in host memory."""
    return array.copy_to_host() if hasattr(array, "copy_to_host") else array.get()


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("length", [1, 1000, 300_001])
def test_means_and_broadcasts(job: Job, library: str, length: int) -> None:
    if not job.on_gpu:
        pytest.skip("needs a GPU")
    array = LIBRARIES[library](np.arange(length, dtype=np.float32) + job.rank)
    mc.gradients([array], out=[array])
    np.testing.assert_allclose(to_host(array), np.arange(length, dtype=np.float32) + job.middle, rtol=1e-6)
    for root in range(job.size):
        array = LIBRARIES[library](np.full((3, length), job.rank, np.int64))
        (result,) = mc.broadcast([array], root)
        assert result is array
        assert (to_host(array) == root).all()


def test_new_arrays_of_cupy(job: Job) -> None:
    if not job.on_gpu:
        pytest.skip("needs a GPU")
    library = pytest.importorskip("cupy")
    with library.cuda.Stream(non_blocking=True) as stream:
        mine = library.full(100_000, float(job.rank))
        (mean,) = mc.gradients([mine])
        total = float(mean.sum())
        stream.synchronize()
    assert isinstance(mean, library.ndarray)
    assert total == 100_000 * job.middle
    assert float(mine[0]) == job.rank
