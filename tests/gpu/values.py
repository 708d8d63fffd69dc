"""Inputs of the ranks, expected means, and bit comparisons. Pure; on the given device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.int8, torch.uint8, torch.int32, torch.int64]
DTYPES = [*FLOATS, *INTEGERS]

# Tolerance of a sum of a few numbers near 1, rounded once or (NCCL) at each step.
_TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5, torch.float64: 1e-12}

# GPU cycles: a few milliseconds.
_BUSY = 5_000_000


def of_rank(rank: int, count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random numbers of a rank in host memory; every rank can generate those of the others."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return torch.randn(count, generator=generator, dtype=wide).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    info = torch.iinfo(dtype)
    # Sums of int64 must fit in the test's accumulator.
    low, high = (-(2**59), 2**59) if dtype == torch.int64 else (info.min, info.max + 1)
    return torch.randint(low, high, (count,), generator=generator, dtype=torch.int64).to(dtype)


def small(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Small numbers in host memory, others on each rank: sums and products of a few ranks are exact in every type."""
    numbers = (torch.arange(count) * 3 + rank) % 5 + 1
    return numbers % 2 == 0 if dtype == torch.bool else numbers.to(dtype)


def late(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device, which is complete only after some time."""
    if device.type == "cpu":
        return tensor.clone()
    pinned, copy = tensor.pin_memory() if tensor.numel() else tensor, torch.zeros_like(tensor, device=device)
    torch.cuda._sleep(_BUSY)
    return copy.copy_(pinned, non_blocking=True)


def mean_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean computed by torch: in float64, or rounded toward zero."""
    dtype = tensors[0].dtype
    if dtype.is_floating_point:
        total = sum(tensor.double() for tensor in tensors)
        return (total / len(tensors)).to(dtype)
    total = sum(tensor.long() for tensor in tensors)
    return torch.div(total, len(tensors), rounding_mode="trunc").to(dtype)


def special(dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Zeros, infinities, NaN, the largest and smallest numbers, ties of rounding; every pair occurs on two ranks."""
    info = torch.finfo(dtype)
    one_up = 1 + info.eps
    found = [0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan"), info.max, info.min, info.tiny]
    found += [-info.tiny, info.smallest_normal / 2, info.tiny * info.eps, info.eps, one_up, 1 + info.eps / 2, 3.0, 1e-3]
    values = torch.tensor(found, dtype=torch.float64).to(dtype)
    rows = values.repeat(len(found), 1) if rank % 2 == 0 else values.repeat_interleave(len(found)).view(len(found), -1)
    return rows.reshape(-1).roll(rank // 2)


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors have the same bits; all NaNs count as equal."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    found, expected = found.detach().cpu().reshape(-1), expected.detach().cpu().reshape(-1)
    if found.dtype.is_floating_point:
        nan = found.isnan()
        if not torch.equal(nan, expected.isnan()):
            return False
        found, expected = found.masked_fill(nan, 0), expected.masked_fill(nan, 0)
    return torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def assert_mean(found: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Fails unless ``found`` is close to the mean of the ranks' tensors."""
    expected = mean_of(tensors)
    tolerance = _TOLERANCE.get(expected.dtype, 0)
    torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=tolerance)
