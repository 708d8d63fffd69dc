"""Work handles on 1, 2, 3 ranks: waiting, results, futures and their callbacks, coalescing, many calls at once."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from c10d_helpers import GLOO, everywhere, folded, lacks, not_gloo, torch_may_refuse, values


def test_a_work_completes(rank: int, size: int) -> None:
    mine = torch.full((4,), float(rank))
    work = dist.all_reduce(mine, async_op=True)
    assert work.wait(timedelta(seconds=30)) is True
    assert work.is_completed()
    assert work.is_success()
    assert mine.tolist() == [size * (size - 1) / 2] * 4
    assert work.wait() is True, "waiting again"
    work.synchronize()


@pytest.mark.skipif(
    "exception_ptr" in str(torch._C._distributed_c10d.Work.exception.__doc__),
    reason=f"torch {torch.__version__} lacks Work.exception(), which returns a type that Python does not know",
)
def test_a_work_that_completes_has_no_exception(rank: int, size: int) -> None:
    work = dist.all_reduce(torch.ones(4), async_op=True)
    work.wait()
    assert work.exception() is None


def test_a_work_completes_without_a_wait(rank: int, size: int) -> None:
    mine = torch.full((100_000,), float(rank))
    work = dist.all_reduce(mine, async_op=True)
    until = time.monotonic() + 30
    while not work.is_completed() and time.monotonic() < until:
        time.sleep(0.001)
    assert work.is_completed()
    assert (mine == size * (size - 1) / 2).all()


CALLS: dict[str, Callable[[int, int], tuple[Any, list[torch.Tensor]]]] = {
    "all_reduce": lambda rank, size: (
        dist.all_reduce(mine := torch.full((2,), float(rank)), async_op=True),
        [mine],
    ),
    "broadcast": lambda rank, size: (dist.broadcast(mine := torch.full((2,), float(rank)), 0, async_op=True), [mine]),
    "all_gather_into_tensor": lambda rank, size: (
        dist.all_gather_into_tensor(whole := torch.zeros(2 * size), torch.full((2,), float(rank)), async_op=True),
        [whole],
    ),
    "reduce_scatter_tensor": lambda rank, size: (
        dist.reduce_scatter_tensor(block := torch.zeros(2), torch.ones(2 * size), async_op=True),
        [block],
    ),
    "all_to_all_single": lambda rank, size: (
        dist.all_to_all_single(whole := torch.zeros(size), torch.full((size,), float(rank)), async_op=True),
        [whole],
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_and_futures(rank: int, size: int, name: str) -> None:
    """The result and the future's value are the list of output tensors, and a work has one future."""
    lacks(
        "no futures of reduce_scatter_tensor, and other values of all_gather",
        when="scatter" in name or "gather" in name,
    )
    work, outputs = CALLS[name](rank, size)
    future = work.get_future()
    value = future.wait()
    assert [tensor.tolist() for tensor in value] == [tensor.tolist() for tensor in outputs]
    assert future.done()
    work.wait()
    assert [tensor.data_ptr() for tensor in work.result()] == [tensor.data_ptr() for tensor in outputs]
    assert [tensor.data_ptr() for tensor in work.get_future().value()] == [tensor.data_ptr() for tensor in outputs]


def test_the_result_of_all_gather(rank: int, size: int) -> None:
    found = [torch.zeros(2) for _ in range(size)]
    work = dist.all_gather(found, torch.full((2,), float(rank)), async_op=True)
    work.wait()
    value = work.get_future().wait()
    parts = value[0] if isinstance(value[0], list) else value
    assert [part.tolist() for part in parts] == [[float(other)] * 2 for other in range(size)]


def test_callbacks(rank: int, size: int) -> None:
    seen: list[float] = []

    def double(future: Any) -> torch.Tensor:
        seen.append(1)
        result: torch.Tensor = future.value()[0] * 2
        return result

    work = dist.all_reduce(torch.ones(3), async_op=True)
    doubled = work.get_future().then(double)
    assert doubled.wait().tolist() == [2.0 * size] * 3
    work.wait()
    assert seen == [1]
    late = work.get_future().then(double)
    assert late.wait().tolist() == [2.0 * size] * 3, "a callback of a completed future"

    def fail(future: Any) -> None:
        raise ValueError("from a callback")

    with pytest.raises((ValueError, RuntimeError), match="from a callback"):
        dist.all_reduce(torch.ones(3), async_op=True).get_future().then(fail).wait()
    work = dist.all_reduce(mine := torch.ones(3), async_op=True)
    work.wait()
    assert mine.tolist() == [size] * 3


@not_gloo("deadlocks, because callbacks run on its two threads")
@pytest.mark.parametrize("number", [2, 20])
@pytest.mark.parametrize("length", [600, 1000])
def test_callbacks_that_wait_for_further_calls(rank: int, size: int, number: int, length: int) -> None:
    """As PowerSGD does it: each callback starts a call and waits for it, while further calls are started."""

    def again(future: Any) -> torch.Tensor:
        part: torch.Tensor = future.value()[0][:length].clone()
        dist.all_reduce(part, async_op=True).wait()
        return part

    first = [torch.full((1000,), i + 1.0) for i in range(number)]
    works = [dist.all_reduce(tensor, async_op=True).get_future().then(again) for tensor in first]
    for i, future in enumerate(works):
        assert (future.wait() == (i + 1) * size * size).all()


def test_many_at_once_and_waited_in_another_order(rank: int, size: int) -> None:
    tensors = [torch.full((1 + 97 * i,), float(rank + i)) for i in range(50)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    for i, tensor in enumerate(tensors):
        assert (tensor == size * (size - 1) / 2 + i * size).all()


def test_kinds_in_flight_together(rank: int, size: int) -> None:
    calls = [CALLS[name](rank, size) for _ in range(5) for name in CALLS]
    for work, _ in calls:
        work.wait()
    assert calls[-1][1][0].tolist() == list(range(size))
    assert calls[0][1][0].tolist() == [size * (size - 1) / 2] * 2


def test_tensors_live_as_long_as_their_call(rank: int, size: int) -> None:
    """Nobody else refers to the tensors, and the works may be dropped."""
    works = [dist.all_reduce(torch.full((200_000,), float(rank)), async_op=True) for _ in range(10)]
    gc.collect()
    noise = [torch.full((200_000,), -1.0) for _ in range(10)]
    for work in works:
        work.wait()
        assert (work.result()[0] == size * (size - 1) / 2).all()
    for _ in range(10):
        dist.all_reduce(torch.full((1000,), float(rank)), async_op=True)
    dist.barrier()
    assert all((part == -1).all() for part in noise)


def test_coalesced_calls(rank: int, size: int) -> None:
    tensors = [torch.full((3,), float(rank)), torch.full((2, 2), 2.0 * rank)]
    total = size * (size - 1) / 2
    dist.all_reduce_coalesced(tensors)
    assert [tensor.flatten()[0].item() for tensor in tensors] == [total, 2 * total]
    tensors = [torch.full((3,), float(rank)), torch.full((2, 2), 2.0 * rank)]
    with dist._coalescing_manager():  # type: ignore[attr-defined]
        for tensor in tensors:
            dist.all_reduce(tensor)
    assert [tensor.flatten()[0].item() for tensor in tensors] == [total, 2 * total]
    with dist._coalescing_manager(async_ops=True) as manager:  # type: ignore[attr-defined]
        for tensor in tensors:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
    manager.wait()
    assert [tensor.flatten()[0].item() for tensor in tensors] == [total, 2 * total]


@pytest.mark.parametrize("async_ops", [False, True])
def test_coalesced_gathers(rank: int, size: int, async_ops: bool) -> None:
    inputs = [values(rank, (length,), torch.float32) for length in (1, 5, 1000)]
    wholes = [torch.zeros(size * len(mine)) for mine in inputs]
    with dist._coalescing_manager(async_ops=async_ops) as manager:  # type: ignore[attr-defined]
        for whole, mine in zip(wholes, inputs, strict=True):
            dist.all_gather_into_tensor(whole, mine)
    manager.wait()
    for whole, mine in zip(wholes, inputs, strict=True):
        assert torch.equal(whole, torch.cat(everywhere(mine.shape, torch.float32, size)))
    blocks = [torch.zeros_like(mine) for mine in inputs]
    with dist._coalescing_manager(async_ops=async_ops) as manager:  # type: ignore[attr-defined]
        for block, whole in zip(blocks, wholes, strict=True):
            dist.reduce_scatter_tensor(block, whole)
    manager.wait()
    for block, mine in zip(blocks, inputs, strict=True):
        assert torch.equal(block, size * mine)


def test_coalescing_with_a_device(rank: int, size: int) -> None:
    """The old form: startCoalescing and endCoalescing of the backend."""
    group = dist.distributed_c10d._get_default_group()
    if not group._get_backend(torch.device("cpu")).supports_coalescing:
        pytest.skip("the backend does not coalesce; torch then sends one after the other")
    tensors = [torch.full((3,), float(rank)) for _ in range(3)]
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:  # type: ignore[attr-defined]
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert all(tensor.tolist() == [size * (size - 1) / 2] * 3 for tensor in tensors)


def test_calls_of_the_process_group_itself(rank: int, size: int) -> None:
    """Programs and DDP's hooks call the object, with tensors in lists."""
    group = dist.distributed_c10d._get_default_group()
    mine = torch.full((2,), float(rank))
    group.allreduce([mine]).wait()
    assert mine.tolist() == [size * (size - 1) / 2] * 2
    group.broadcast(mine, 0).wait()
    outputs = [[torch.zeros(2) for _ in range(size)]]
    group.allgather(outputs, [torch.full((2,), float(rank))]).wait()
    assert [part[0].item() for part in outputs[0]] == list(range(size))
    group.barrier().wait()
    assert (group.rank(), group.size()) == (rank, size)


def test_names_and_ranks(rank: int, size: int) -> None:
    assert dist.get_backend() == ("gloo" if GLOO else "dl_comm")
    group = dist.distributed_c10d._get_default_group()
    assert dist.get_process_group_ranks(group) == list(range(size))


def test_sequence_numbers(rank: int, size: int) -> None:
    group = dist.distributed_c10d._get_default_group()
    with torch_may_refuse("custom does not yet support sequence numbers", "sequence numbers of backends by others"):
        before = group._get_sequence_number_for_group()
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    assert group._get_sequence_number_for_group() >= before


def test_the_profiler_names_the_calls(rank: int, size: int) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(torch.ones(3))
        dist.broadcast(torch.ones(3), 0)
    names = {event.name for event in profile.events()}
    assert any("all_reduce" in name or "allreduce" in name for name in names), names
    assert any("broadcast" in name for name in names), names
    if not GLOO:
        assert "dl_comm:all_reduce" in names, names


def test_random_calls(rank: int, size: int) -> None:
    """A seeded mixture of sizes, types and calls, partly in flight at once."""
    generator = torch.Generator().manual_seed(5)
    pending: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
    for _ in range(150):
        length = int(torch.randint(0, 20_000, (), generator=generator))
        dtype = [torch.float32, torch.int64, torch.float64][int(torch.randint(3, (), generator=generator))]
        mine = values(rank, (length,), dtype)
        if torch.rand((), generator=generator) < 0.7:
            work = dist.all_reduce(mine, async_op=True)
            pending.append((work, mine, folded("sum", everywhere((length,), dtype, size))))
        else:
            root = int(torch.randint(size, (), generator=generator))
            pending.append((dist.broadcast(mine, root, async_op=True), mine, values(root, (length,), dtype)))
        if torch.rand((), generator=generator) < 0.3:
            for work, found, expected in pending:
                work.wait()
                assert torch.equal(found, expected)
            pending.clear()
    for work, found, expected in pending:
        work.wait()
        assert torch.equal(found, expected)
