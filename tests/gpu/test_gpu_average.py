"""Averages of tensors in GPU memory, on any number of ranks: values, types, lengths, layouts.

Each is compared with what torch works out from the inputs of all ranks, and, to the bit, with dl_comm's own average of
the same numbers in host memory (NCCL adds in an order of its own: close, then).
"""

from __future__ import annotations

import pytest
import torch

import dl_comm as mc
import dl_comm.torch as cdl
from dl_comm.torch import _ops
from job import Job
from values import DTYPES, FLOATS, INTEGERS, assert_mean, of_rank, same_bits, special

# One-shot up to this many bytes, two-shot beyond (core/src/collective/device/ipc.rs).
SHOT = 256 << 10


def elements(size: str, dtype: torch.dtype) -> int:
    """The number of elements of a named size."""
    whole = SHOT // dtype.itemsize
    return {
        "none": 0,
        "one": 1,
        "odd": 777,
        "page": 4096 // dtype.itemsize,
        "below a shot": whole - 1,
        "a shot": whole,
        "above a shot": whole + 1,
        "3 million": 3_000_000,
    }[size]


def compare(job: Job, means: list[torch.Tensor], inputs: list[torch.Tensor], team: int = 0) -> None:
    """Fails unless ``means`` (on the device) are dl_comm's means of ``inputs`` (in host memory)."""
    expected = cdl.gradients(inputs, team)
    for index, (mean, cpu) in enumerate(zip(means, expected, strict=True)):
        assert mean.device == job.device
        assert mean.dtype == cpu.dtype
        assert mean.shape == cpu.shape
        if job.exact:
            assert same_bits(mean, cpu), f"tensor {index}"
        else:
            tolerance = 2 * torch.finfo(cpu.dtype).eps if cpu.dtype.is_floating_point else 0
            torch.testing.assert_close(mean.cpu(), cpu, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", ["none", "one", "odd", "page", "below a shot", "a shot", "above a shot", "3 million"])
def test_every_type_and_length(job: Job, dtype: torch.dtype, size: str) -> None:
    count = elements(size, dtype)
    everyone = [of_rank(rank, count, dtype) for rank in range(job.size)]
    mine = everyone[job.rank].to(job.device, copy=True)
    before = mine.clone()
    (mean,) = cdl.gradients([mine], 0)
    assert mean.data_ptr() != mine.data_ptr() or count == 0
    assert same_bits(mine, before)
    assert_mean(mean, everyone)
    compare(job, [mean], [everyone[job.rank]])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_special_values(job: Job, dtype: torch.dtype) -> None:
    mine = special(dtype, job.rank)
    means = cdl.gradients([mine.to(job.device, copy=True)], 0)
    if not job.exact:
        pytest.skip("NCCL adds in an order of its own, which decides whether a sum is infinite")
    compare(job, means, [mine])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", ["odd", "above a shot"])
def test_a_team_that_adds_in_float64(job: Job, dtype: torch.dtype, size: str) -> None:
    team = 40
    if team not in mc.stats()["teams"]:
        mc.create_team(team, 2, 1)
    everyone = [of_rank(rank, elements(size, dtype), dtype, 1) for rank in range(job.size)]
    means = cdl.gradients([everyone[job.rank].to(job.device, copy=True)], team)
    assert_mean(means[0], everyone)
    compare(job, means, [everyone[job.rank]], team)


@pytest.mark.parametrize("in_place", [False, True], ids=["new", "in place"])
def test_large(job: Job, in_place: bool) -> None:
    """256 MiB, computed and compared on the device."""
    count = 64 << 20
    # Sums of small integers are exact, and so is twice their mean on 1, 2 and 4 ranks.
    pattern = (torch.arange(count, device=job.device) % 1021).to(torch.float32)
    mine = pattern + job.rank
    if in_place:
        _ops.average_in_place([mine], 0, "large")
        mean = mine
    else:
        (mean,) = cdl.gradients([mine], 0)
    difference = mean.sub_(pattern).sub_(job.middle).abs_().max()
    assert float(difference) <= 1e-3
    del mean, mine, pattern
    if job.on_gpu:
        torch.cuda.empty_cache()


def test_thousands_of_small_tensors(job: Job) -> None:
    def tensors(rank: int) -> list[torch.Tensor]:
        return [of_rank(rank, i * 7 % 200, DTYPES[i % len(DTYPES)], i) for i in range(2000)]

    mine = tensors(job.rank)
    means = cdl.gradients([tensor.to(job.device, copy=True) for tensor in mine], 0)
    for mean, *everyone in zip(means, *map(tensors, range(job.size)), strict=True):
        assert_mean(mean, everyone)
    compare(job, means, mine)


def test_lists_keep_order_shapes_and_types(job: Job) -> None:
    shapes = [(), (0,), (3, 0, 2), (1,), (5, 7), (129,), (300, 400)]
    mine = [torch.full(shape, float(i + job.rank), dtype=FLOATS[i % 4]) for i, shape in enumerate(shapes)]
    means = cdl.gradients([tensor.to(job.device, copy=True) for tensor in mine], 0)
    compare(job, means, mine)
    for i, mean in enumerate(means):
        torch.testing.assert_close(mean, torch.full_like(mean, i + job.middle))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", ["odd", "above a shot"])
@pytest.mark.parametrize("offset", [1, 3, 13])
def test_views_in_place(job: Job, dtype: torch.dtype, size: str, offset: int) -> None:
    """At any offset; memory outside the view does not change."""
    count = elements(size, dtype)
    everyone = [of_rank(rank, count + 40, dtype, 2) for rank in range(job.size)]
    mine = everyone[job.rank].to(job.device, copy=True)
    _ops.average_in_place([mine[offset : offset + count]], 0, "views")
    found = mine.cpu()
    assert same_bits(found[:offset], everyone[job.rank][:offset])
    assert same_bits(found[offset + count :], everyone[job.rank][offset + count :])
    inside = [tensor[offset : offset + count] for tensor in everyone]
    assert_mean(found[offset : offset + count], inside)
    compare(job, [mine[offset : offset + count]], [inside[job.rank].clone()])


def test_views_of_one_tensor(job: Job) -> None:
    """Many views of one allocation, which all ranks read and write."""
    everyone = [of_rank(rank, 500_000, torch.float32, 3) for rank in range(job.size)]
    mine = everyone[job.rank].to(job.device, copy=True)
    cuts = [0, 1, 4, 1000, 70_000, 70_003, 300_000, 500_000]
    views = [mine[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    _ops.average_in_place(views, 0, "cuts")
    assert_mean(mine, everyone)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_means_of_integers_round_toward_zero(job: Job, dtype: torch.dtype) -> None:
    start = torch.arange(0, 50) if dtype == torch.uint8 else torch.arange(-25, 25)
    (mean,) = cdl.gradients([(start + job.rank**2).to(job.device, dtype)], 0)
    total = job.size * start + sum(rank**2 for rank in range(job.size))
    assert torch.equal(mean.cpu(), total.div(job.size, rounding_mode="trunc").to(dtype))


def test_strided_input_gives_contiguous_output(job: Job) -> None:
    mine = (torch.arange(12.0, device=job.device).reshape(3, 4) + job.rank).t()
    (mean,) = cdl.gradients([mine], 0)
    assert mean.is_contiguous()
    torch.testing.assert_close(mean.cpu(), torch.arange(12.0).reshape(3, 4).t() + job.middle)


def test_memory_that_is_freed_and_reused(job: Job) -> None:
    """Memory that one rank has exported may be freed or reused in the next call."""
    for step in range(12):
        count = (step * 5 % 12 + 1) * 100_000 + step
        everyone = [of_rank(rank, count, torch.float32, step) for rank in range(job.size)]
        (mean,) = cdl.gradients([everyone[job.rank].to(job.device, copy=True)], 0)
        assert_mean(mean, everyone)
        del mean
        if job.on_gpu and step % 3 < 2:
            torch.cuda.empty_cache()
