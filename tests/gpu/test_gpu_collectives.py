"""Every collective on GPU tensors, on any number of ranks: the results of the same calls on host memory.

Each input is written on a stream that is busy for some time, so that a call that does not wait for it fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dl_comm.torch as cdl
from job import Job
from values import FLOATS, late, small

INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64]
COMPLEX = [torch.complex64, torch.complex128]
ALL = [*FLOATS, *INTEGERS, *COMPLEX, torch.bool]
LENGTHS = [0, 1, 777, 100_001]


def operators(dtype: torch.dtype) -> list[str]:
    """The names of the reductions that a type has."""
    if dtype == torch.bool:
        return ["bit_and", "bit_or", "bit_xor"]
    if dtype.is_complex:
        return ["sum", "mean"]
    bits = [] if dtype.is_floating_point else ["bit_and", "bit_or", "bit_xor"]
    return ["sum", "mean", "min", "max", "product", *bits]


def assert_same(found: torch.Tensor, expected: torch.Tensor, job: Job, text: object) -> None:
    """Fails unless a result on the device is that of the call on host memory. NCCL rounds means differently."""
    assert found.device == job.device, text
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), text
    found = found.cpu()
    if found.is_floating_point() and not job.exact:
        tolerance = 2 * torch.finfo(found.dtype).eps
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=0, msg=lambda detail: f"{text}: {detail}")
        return
    wide = torch.complex128 if found.is_complex() else torch.float64
    assert torch.equal(found.to(wide), expected.to(wide)), text


def compare(job: Job, call: Callable[[Any], Any], given: Any, text: object) -> None:
    """Makes a call with tensors in host memory and on the device. The inputs must not change."""
    is_list = isinstance(given, list)
    inputs = given if is_list else [given]
    expected, on_device = call(given), [late(tensor, job.device) for tensor in inputs]
    found = call(on_device if is_list else on_device[0])
    if expected is None:
        assert found is None, text
        return
    for one, other in zip(found if is_list else [found], expected if is_list else [expected], strict=True):
        assert_same(one, other, job, text)
    for one, other in zip(on_device, inputs, strict=True):
        assert torch.equal(one.cpu().view(torch.uint8), other.view(torch.uint8)), text


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_reductions_of_every_operator_and_type(job: Job, dtype: torch.dtype) -> None:
    for op in operators(dtype):
        for length in LENGTHS:
            mine = small(job.rank, length, dtype)
            compare(job, lambda x, op=op: cdl.allreduce(x, op), mine, ("allreduce", op, length))
            compare(job, lambda x, op=op: cdl.reduce(x, job.size - 1, op), mine, ("reduce", op, length))
            blocks = small(job.rank, length * job.size, dtype)
            compare(job, lambda x, op=op: cdl.reduce_scatter(x, op), blocks, ("reduce_scatter", op, length))


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_moves_of_every_type(job: Job, dtype: torch.dtype) -> None:
    for length in LENGTHS:
        mine, blocks = small(job.rank, length, dtype), small(job.rank, length * job.size, dtype)
        compare(job, cdl.all_gather, mine, ("all_gather", length))
        compare(job, cdl.all_to_all, blocks, ("all_to_all", length))
        for root in range(job.size):
            compare(job, lambda x, root=root: cdl.gather(x, root), mine, ("gather", root, length))
            compare(job, lambda x, root=root: cdl.scatter(x, root), blocks, ("scatter", root, length))


def test_blocks_of_different_lengths(job: Job) -> None:
    counts = [0 if rank == 1 else 1000 * rank + 7 for rank in range(job.size)]
    mine = small(job.rank, counts[job.rank], torch.float32)
    whole = small(job.rank, sum(counts), torch.float32)
    compare(job, lambda x: cdl.all_gather(x, ragged=True), mine, "all_gather")
    compare(job, lambda x: cdl.gather(x, 0, counts=counts), mine, "gather")
    compare(job, lambda x: cdl.scatter(x, 0, counts=counts), whole, "scatter")
    compare(job, lambda x: cdl.reduce_scatter(x, counts=counts), whole, "reduce_scatter")
    send = [(job.rank + other) % 3 * 100 for other in range(job.size)]
    compare(job, lambda x: cdl.all_to_all(x, send_counts=send), small(job.rank, sum(send), torch.float32), "all_to_all")


def test_lists(job: Job) -> None:
    mine = [small(job.rank, length, torch.float32) for length in (5, 0, 70_000, 1)]
    compare(job, lambda x: cdl.allreduce(x, "max"), mine, "allreduce")
    compare(job, cdl.all_gather, mine, "all_gather")
    blocks = [small(job.rank, length * job.size, torch.float32) for length in (5, 0, 70_000, 1)]
    compare(job, cdl.reduce_scatter, blocks, "reduce_scatter")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_scaled_sums(job: Job, dtype: torch.dtype) -> None:
    for prescale, postscale in ((0.5, 1.0), (1.0, 0.25), (0.1, 3.0)):
        for length in (5, 100_001):
            scaled = lambda x, a=prescale, b=postscale: cdl.allreduce(x, prescale=a, postscale=b)  # noqa: E731
            compare(job, scaled, small(job.rank, length, dtype), (prescale, postscale, length))


@pytest.mark.parametrize("length", [100, 1_000_000])
def test_many_calls_in_flight(job: Job, length: int) -> None:
    """Their results are complete for the stream on which the handle was waited for."""
    inputs = [late(small(job.rank + step, length, torch.float32), job.device) for step in range(8)]
    works = [cdl.allreduce(tensor, name=f"{length} {step}", async_op=True) for step, tensor in enumerate(inputs)]
    for step, work in enumerate(works):
        expected = sum(small(rank + step, length, torch.float32) for rank in range(job.size))
        assert_same(work.wait(), expected, job, step)


def test_results_in_given_tensors(job: Job) -> None:
    mine = late(small(job.rank, 1000, torch.float32), job.device)
    everything = torch.zeros(1000 * job.size, device=job.device)
    assert cdl.all_gather(mine, out=everything) is everything
    expected = torch.cat([small(rank, 1000, torch.float32) for rank in range(job.size)])
    assert_same(everything, expected, job, "all_gather")
    cdl.allreduce(mine, out=mine)
    assert_same(mine, sum(small(rank, 1000, torch.float32) for rank in range(job.size)), job, "in place")


def test_groups(job: Job) -> None:
    """Groups of all ranks, of one, and of every other, at work in turn."""
    with cdl.Group(range(job.size)) as everyone, cdl.split(job.rank % 2) as alternate, cdl.split(job.rank) as alone:
        for step in range(3):
            for group in (everyone, alternate, alone):
                for length in (10, 200_000):
                    mine = late(small(job.rank + step, length, torch.float32), job.device)
                    expected = sum(small(rank + step, length, torch.float32) for rank in group.ranks)
                    assert_same(cdl.allreduce(mine, group=group), expected, job, (step, group.ranks, length))


def test_gradients_of_collectives(job: Job) -> None:
    mine = torch.full((4,), float(job.rank + 1), device=job.device, requires_grad=True)
    weights = torch.arange(4.0 * job.size, device=job.device) * (job.rank + 1)
    (cdl.all_gather(mine) * weights).sum().backward()
    block = torch.arange(4.0) + 4 * job.rank
    assert_same(mine.grad, block * sum(range(1, job.size + 1)), job, "all_gather")
