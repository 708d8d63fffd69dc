"""`gradients`, `broadcast` and `average` on the arrays of each framework, on 1, 2 and 3 ranks."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dl_comm
from frameworks import FLOATS, Framework, dtype_of, same

INTEGERS = ["int8", "uint8", "int32", "int64"]
SHAPES = [(), (0,), (1,), (3, 0, 2), (2, 5), (1, 2, 3, 4), (1000,), (70_000,)]


def means_of(size: int, of_rank: Any) -> Any:
    """The means over the ranks, in float64."""
    return sum(of_rank(rank).astype(np.float64) for rank in range(size)) / size


@pytest.mark.parametrize("dtype", FLOATS)
def test_means_of_floats(framework: Framework, mode: str, dtype: str, rank: int, size: int) -> None:
    def of_rank(rank: int) -> list[Any]:  # small whole numbers, whose sums are exact in every type
        return [((np.arange(np.prod(shape)) + rank) % 23).reshape(shape).astype(dtype_of(dtype)) for shape in SHAPES]

    program = framework.runner(lambda *x: [framework.comm.gradients(list(x), 0), list(x)], mode)
    means, kept = program(*of_rank(rank))
    same(kept, of_rank(rank))
    # Only the division rounds, and the conversion to the type: two units in the last place.
    expected = [means_of(size, lambda r, i=i: of_rank(r)[i]).astype(dtype_of(dtype)) for i in range(len(SHAPES))]
    same(means, expected, tolerance=2 * float(ml_dtypes.finfo(dtype_of(dtype)).eps))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_means_of_integers_round_toward_zero(framework: Framework, mode: str, dtype: str, rank: int, size: int) -> None:
    def of_rank(rank: int) -> Any:
        return (np.arange(50) - (0 if dtype == "uint8" else 25) + rank * rank).astype(dtype)

    (mean,) = framework.runner(lambda x: framework.comm.gradients([x], 1), mode)(of_rank(rank))
    same(mean, np.trunc(means_of(size, of_rank)).astype(dtype))


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, "bool"])
def test_every_root_broadcasts(framework: Framework, dtype: str, rank: int, size: int) -> None:
    def of_rank(rank: int) -> list[Any]:
        return [(np.arange(1000) * (rank + 1) % 7).astype(dtype_of(dtype)), np.array(rank, dtype_of(dtype))]

    for root in range(size):
        given = list(map(framework.make, of_rank(rank)))
        returned = framework.comm.broadcast(given, root)
        framework.check(returned, of_rank(root))
        if framework.supports("out"):
            assert all(new is old for new, old in zip(returned, given, strict=True)), "in place"


def test_thousands_of_arrays_of_all_kinds(framework: Framework, rank: int, size: int) -> None:
    types, shapes = [*FLOATS, *INTEGERS], [(), (0,), (3, 0, 2), *[(length,) for length in range(1, 13)]]
    kinds = [(dtype_of(types[i % 8]), shapes[i % len(shapes)]) for i in range(4000)]
    means = framework.comm.gradients([framework.make(np.full(shape, 2 * rank, dtype)) for dtype, shape in kinds], 1)
    framework.check(means, [np.full(shape, size - 1, dtype) for dtype, shape in kinds])


def test_a_large_array_has_the_same_bits_everywhere(framework: Framework, rank: int, size: int) -> None:
    def of_rank(rank: int) -> Any:
        return np.random.default_rng(rank).standard_normal(1 << 20).astype(np.float32)

    (mean,) = framework.comm.gradients([framework.make(of_rank(rank))], 0)
    assert dl_comm.check_buffers_match([mean], 0) == 0
    framework.check(mean, means_of(size, of_rank).astype(np.float32), tolerance=1e-6)


def test_metrics_of_integers_are_not_rounded(framework: Framework, mode: str, rank: int, size: int) -> None:
    def averages(*numbers: Any) -> list[Any]:
        return [average(number) for average in (framework.comm.average, dl_comm.average) for number in numbers]

    integers = [np.array([rank % 2, 1], dtype) for dtype in ("int8", "uint16", "int32", "int64", "bool")]
    *means, large, narrow = framework.runner(averages, mode)(*integers, np.array([2**40 + rank]), np.float32([rank]))[
        :7
    ]
    same(means, [np.array([size // 2 / size, 1.0])] * 5, tolerance=1e-15)
    same(large, np.array([2**40 + (size - 1) / 2]))
    same(narrow, np.array([(size - 1) / 2], np.float32))
    numbers = (rank, float(rank), np.float32(rank), np.int64(rank))
    assert [float(framework.comm.average(number)) for number in numbers] == [(size - 1) / 2] * 4


@pytest.mark.needs("gradients")
def test_gradients_of_means(framework: Framework, mode: str, rank: int, size: int) -> None:
    """Up to the second; an integer has none, and is not in the way."""

    def cubed(x: Any) -> Any:
        y = framework.comm.gradients([x, framework.make(np.array([rank]))])[0]
        return (rank + 1) * (y * y * y)

    def program(x: Any, v: Any) -> list[Any]:
        return [
            framework.derivative(cubed, x, v)[1],
            framework.derivative(lambda x: framework.derivative(cubed, x, v)[1], x, v)[1],
        ]

    mean, weight = (size + 1) / 2, (size + 1) / 2
    found = framework.runner(program, mode)(np.full(2, rank + 1.0), np.ones(2))
    same(found, [np.full(2, weight * 3 * mean**2), np.full(2, weight * 6 * mean)], tolerance=1e-12)
