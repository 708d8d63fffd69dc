"""Values, comparisons and marks of the tests of the torch.distributed backend."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist

BACKEND = os.environ.get("DL_COMM_TEST_C10D_BACKEND", "dl_comm")
"""The backend under test."""
GLOO = BACKEND == "gloo"

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16]
COMPLEX = [torch.complex64, torch.complex128]
REDUCED = [*FLOATS, *INTEGERS, *COMPLEX, torch.bool]
"""The types of reductions."""
MOVED = [*REDUCED, torch.float8_e4m3fn]
"""The types of everything else."""
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (5, 3), (1000,)]


def load() -> None:
    """Registers the backend where torch does not find it by itself."""
    if BACKEND == "dl_comm":
        import dl_comm.torch  # noqa: F401


def lacks(reason: str, *, when: bool = True) -> None:
    """Skips a test on gloo."""
    if GLOO and when:
        pytest.skip(f"gloo: {reason}")


def not_gloo(reason: str) -> pytest.MarkDecorator:
    """Marks a test that gloo cannot pass."""
    return pytest.mark.skipif(GLOO, reason=f"gloo: {reason}")


@contextlib.contextmanager
def torch_may_refuse(message: str, feature: str) -> Iterator[None]:
    """Skips a test of a feature that older versions of torch refuse, by themselves, with this message."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if message not in str(error):
            raise
        pytest.skip(f"torch {torch.__version__} lacks {feature}")


def fewer_than(ranks: int) -> pytest.MarkDecorator:
    """Marks a test that needs so many ranks."""
    return pytest.mark.skipif(int(os.environ.get("WORLD_SIZE", "1")) < ranks, reason=f"needs {ranks} ranks")


def values(rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Small positive numbers, other ones on each rank."""
    count = torch.Size(shape).numel()
    numbers = ((torch.arange(count) * 3 + rank) % 7 + 1).reshape(tuple(shape))
    if dtype == torch.bool:
        return numbers % 2 == 0
    if dtype.is_complex:
        return torch.complex(numbers.double(), -numbers.double() - rank).to(dtype)
    return numbers.to(dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """A type that holds all results of small values."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64


def equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether type, shape and values are the same; torch cannot compare some types."""
    kind = wide(found.dtype)
    return found.dtype == expected.dtype and torch.equal(found.to(kind), expected.to(kind))


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether type and shape are the same, and the values but for one rounding."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    if not (found.is_floating_point() or found.is_complex()):
        return equal(found, expected)
    kind = wide(found.dtype)
    return torch.allclose(found.to(kind), expected.to(kind), rtol=2 * torch.finfo(found.dtype).eps, atol=0)


Reference = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
OPERATORS: dict[str, tuple[Any, Reference]] = {
    "sum": (dist.ReduceOp.SUM, torch.add),
    "avg": (dist.ReduceOp.AVG, torch.add),
    "product": (dist.ReduceOp.PRODUCT, torch.mul),
    "min": (dist.ReduceOp.MIN, torch.minimum),
    "max": (dist.ReduceOp.MAX, torch.maximum),
    "band": (dist.ReduceOp.BAND, torch.bitwise_and),
    "bor": (dist.ReduceOp.BOR, torch.bitwise_or),
    "bxor": (dist.ReduceOp.BXOR, torch.bitwise_xor),
}
"""The ReduceOps without a factor, by name."""


def operators(dtype: torch.dtype) -> list[str]:
    """The names of the operators that a type has. torch refuses others of complex numbers itself."""
    if dtype.is_complex:
        return ["sum", "avg"]
    if dtype == torch.bool:
        return ["sum", "product", "min", "max", "band", "bor", "bxor"]
    return list(OPERATORS)[: 5 if dtype.is_floating_point else 8]


def folded(name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The reduction of all ranks' tensors in one process: in a wide type, rounded once. A sum of bools is an "or"."""
    dtype = tensors[0].dtype
    result = reduce(OPERATORS[name][1], [tensor.to(wide(dtype)) for tensor in tensors])
    if name == "avg":
        count = len(tensors)
        exact = dtype.is_floating_point or dtype.is_complex
        result = result / count if exact else torch.div(result, count, rounding_mode="trunc")
    return result.to(dtype)


def everywhere(shape: Sequence[int], dtype: torch.dtype, ranks: int) -> list[torch.Tensor]:
    """The values of all ranks."""
    return [values(other, shape, dtype) for other in range(ranks)]


def gloo_reduces(name: str, dtype: torch.dtype) -> bool:
    """Whether gloo has this operator for this type."""
    if dtype in (torch.int16, torch.uint16, torch.bool) or name == "avg":
        return False
    return not (dtype.is_floating_point and name in ("band", "bor", "bxor"))


def premultiplied(factor: float | torch.Tensor) -> Any:
    """The ReduceOp PREMUL_SUM, in all versions of torch."""
    return dist._make_nccl_premul_sum(factor)  # type: ignore[attr-defined]
