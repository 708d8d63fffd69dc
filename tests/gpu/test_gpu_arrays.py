"""Arrays of CuPy, Numba and JAX in GPU memory, on any number of ranks, if these are installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dl_comm as mc
from dl_comm._arrays.cuda_arrays import DeviceArray
from job import Job


def cupy(values: np.ndarray) -> Any:
    """A CuPy array."""
    return pytest.importorskip("cupy").asarray(values)


def numba(values: np.ndarray) -> Any:
    """An array of Numba."""
    return pytest.importorskip("numba.cuda").to_device(values)


def jax(values: np.ndarray) -> Any:
    """An array of JAX, which nobody may write."""
    return pytest.importorskip("jax.numpy").asarray(values)


LIBRARIES: dict[str, Callable[[np.ndarray], Any]] = {"cupy": cupy, "numba": numba}


def to_host(array: Any) -> np.ndarray:
    """A copy in host memory."""
    if hasattr(array, "copy_to_host"):
        return array.copy_to_host()
    if isinstance(array, DeviceArray):
        return pytest.importorskip("numba.cuda").as_cuda_array(array).copy_to_host()
    return array.get() if hasattr(array, "get") else np.asarray(array)


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


@pytest.mark.parametrize("library", [*LIBRARIES, "jax"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "uint8"])
@pytest.mark.parametrize("length", [1, 10_000, 1_000_000])
def test_every_collective_gives_what_it_gives_for_numpy(job: Job, library: str, dtype: str, length: int) -> None:
    if not job.on_gpu:
        pytest.skip("needs a GPU")
    make = jax if library == "jax" else LIBRARIES[library]
    host = ((np.arange(length * job.size) * 7 + 3 * job.rank) % 5 + 1).astype(dtype)
    calls: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        *((mc.allreduce, {"op": op}) for op in ("sum", "min", "max", "product")),
        (mc.allreduce, {"async_op": True}),
        (mc.reduce_scatter, {}),
        (mc.reduce, {"root": job.size - 1}),
        (mc.all_gather, {}),
        (mc.all_gather, {"ragged": True}),
        (mc.gather, {}),
        (mc.scatter, {"root": job.size - 1}),
        (mc.all_to_all, {}),
        (mc.broadcast, {"root": job.size - 1, "in_place": False}),
    ]
    for call, options in calls:
        found, expected = call(make(host), **options), call(host, **options)
        if isinstance(found, mc.Work):
            found, expected = found.wait(), expected.wait()
        if expected is None:
            assert found is None
        else:
            np.testing.assert_array_equal(to_host(found), expected, err_msg=f"{call.__name__} {options}")
