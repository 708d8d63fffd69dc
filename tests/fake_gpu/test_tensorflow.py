"""TensorFlow's kernels for GPUs: every collective and type by each path, on some ranks by test_device_tensorflow.py.

The device is that of fake_cuda/tensorflow_device.cc, a GPU for each rank. ``TENSORFLOW_DEVICE`` names its library.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import load_library

# Before TensorFlow looks for devices.
load_library.load_pluggable_device_library(os.environ["TENSORFLOW_DEVICE"])
# This TensorFlow has no CUDA; with it, dl_comm does not move calls to the CPU.
tf.test.is_built_with_cuda = lambda: True

import dl_comm  # noqa: E402
import dl_comm.tensorflow as dt  # noqa: E402

dl_comm.init()
RANK, SIZE = dl_comm.rank(), dl_comm.size()
DEVICE = f"GPU:{RANK}"
PATHS = ("nccl", "ipc", "staged")

FLOATS = ["float16", "bfloat16", "float32", "float64"]
INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
COMPLEX = ["complex64", "complex128"]
REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": np.sum,
    "product": np.prod,
    "min": np.min,
    "max": np.max,
    "mean": lambda all_values, axis: np.sum(all_values, axis) / SIZE,
}
BITS = {"bit_and": np.bitwise_and, "bit_or": np.bitwise_or, "bit_xor": np.bitwise_xor}


@pytest.fixture(scope="module", params=PATHS)
def group(request: pytest.FixtureRequest) -> Iterator[dt.Group]:
    with dt.Group(name=request.param, gpu_path=request.param) as made:
        yield made


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with tf.device(DEVICE):
        yield


@pytest.fixture(scope="module", autouse=True)
def job() -> Iterator[None]:
    yield
    dl_comm.finalize()


def values(dtype: str, rank: int, length: int = 6) -> np.ndarray:
    """Small numbers that every type and every order of additions keeps exactly."""
    numbers = np.arange(length) % 3 + 1 + rank
    if dtype == "bool":
        return numbers % 2 == 1
    return (numbers + 1j * rank if dtype in COMPLEX else numbers).astype(tf.as_dtype(dtype).as_numpy_dtype)


def on_gpu(array: np.ndarray) -> tf.Tensor:
    return tf.identity(tf.constant(array))


def check(found: tf.Tensor, expected: Any, rtol: float = 0) -> None:
    assert found.device.endswith(DEVICE), found.device
    expected = np.asarray(expected)
    assert found.shape == expected.shape
    np.testing.assert_allclose(np.asarray(found).astype(expected.dtype), expected, rtol)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *COMPLEX])
def test_operators(dtype: str, group: dt.Group) -> None:
    every = np.stack([values(dtype, rank).astype("c16" if dtype in COMPLEX else "f8") for rank in range(SIZE)])
    for op, of in REDUCTIONS.items():
        if dtype in COMPLEX and op not in ("sum", "mean"):
            continue
        expected = of(every, axis=0)
        if dtype in INTEGERS:
            expected = np.trunc(expected)
        # NCCL divides before it adds.
        rounded = op == "mean" and dtype not in INTEGERS
        check(dt.allreduce(on_gpu(values(dtype, RANK)), op, group=group), expected, 1e-2 if rounded else 0)
    if dtype in INTEGERS:
        for op, fold in BITS.items():
            check(dt.allreduce(on_gpu(values(dtype, RANK)), op, group=group), fold.reduce(every.astype("i8"), axis=0))


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *COMPLEX, "bool"])
def test_collectives(dtype: str, group: dt.Group) -> None:
    own, every = values(dtype, RANK), [values(dtype, rank) for rank in range(SIZE)]
    check(dt.all_gather(on_gpu(own), group=group), np.concatenate(every))
    gathered = dt.gather(on_gpu(own), 0, group=group)
    check(gathered, np.concatenate(every) if RANK == 0 else own[:0])
    last = SIZE - 1
    check(dt.scatter(on_gpu(np.tile(own, SIZE)), last, group=group), every[last])
    blocks = values(dtype, RANK, 2 * SIZE)
    sent = [values(dtype, rank, 2 * SIZE)[2 * RANK : 2 * RANK + 2] for rank in range(SIZE)]
    check(dt.all_to_all(on_gpu(blocks), group=group), np.concatenate(sent))
    (copied,) = dl_comm.broadcast([on_gpu(own)], last, group=group)
    check(copied, every[last])
    if dtype != "bool":
        total = np.sum([each.astype("c16" if dtype in COMPLEX else "f8") for each in sent], axis=0)
        check(dt.reduce_scatter(on_gpu(blocks), group=group), total)
        reduced = dt.reduce(on_gpu(own), last, group=group)
        whole = np.sum([each.astype("c16" if dtype in COMPLEX else "f8") for each in every], axis=0)
        check(reduced, whole if last == RANK else np.zeros_like(whole))


@pytest.mark.parametrize("length", [1, 1000, 70_000, 1 << 20])
def test_lengths_and_lists(length: int, group: dt.Group) -> None:
    one, two = np.full(length, RANK, "f4"), np.full((length, 2), 2 * RANK + 1, "i4")
    total = sum(range(SIZE))
    for _ in range(2):
        sums = dt.allreduce([on_gpu(one), on_gpu(two)], group=group)
        check(sums[0], np.full(length, total))
        check(sums[1], np.full((length, 2), 2 * total + SIZE))


def test_means_of_a_team() -> None:
    for dtype in ("float16", "float32", "float64", "int32", "int64"):
        (mean,) = dl_comm.gradients([on_gpu(values(dtype, 2 * RANK))])
        check(mean, (values(dtype, 0) + SIZE - 1).astype("f8"), 1e-2)
    path = dl_comm.topology()["teams"][0]["gpu"]["path"]
    assert path == ("nccl" if SIZE > 1 else "single_rank")


def test_graphs_and_gradients(group: dt.Group) -> None:
    @tf.function(jit_compile=False)
    def step(one: Any, other: Any) -> Any:
        mean = dt.allreduce(one, "mean", group=group)
        return dt.allreduce(mean, group=group), dt.all_gather(other, group=group)

    for turn in range(5):
        total, joined = step(on_gpu(np.full(6, SIZE * (RANK + turn), "f4")), on_gpu(np.full(9, RANK + turn, "f4")))
        check(total, np.full(6, SIZE * (sum(range(SIZE)) + turn * SIZE)))
        check(joined, np.repeat(np.arange(SIZE) + turn, 9))
    x = on_gpu(np.ones(6, "f4"))
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = dt.allreduce(x, group=group)
    check(tape.gradient(y, x, output_gradients=on_gpu(np.full(6, RANK + 1, "f4"))), np.full(6, sum(range(SIZE)) + SIZE))


def test_a_mismatch_is_reported_and_the_next_call_works() -> None:
    if SIZE > 1:
        with pytest.raises(dl_comm.MismatchError):
            dt.allreduce(on_gpu(np.zeros(3 + RANK, "f4")))
    check(dt.allreduce(on_gpu(np.full(5, RANK, "f4"))), np.full(5, sum(range(SIZE))))


def test_a_compiled_function_is_refused() -> None:
    compiled = tf.function(lambda x: dt.allreduce(x), jit_compile=True)
    with pytest.raises(Exception, match="(?i)xla|jit|compil"):
        compiled(on_gpu(np.ones(3, "f4")))
