"""Collectives of `horovod.torch`: results, gradients, names, handles, errors, process sets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import horovod.torch as hvd

REDUCED = [torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
MOVED = [*REDUCED, torch.uint8, torch.int8, torch.int16, torch.bool]


def of(rank: int, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (3, 4)) -> torch.Tensor:
    """The tensor of a rank: small integers, exact in every type."""
    values = torch.arange(torch.Size(shape).numel()).reshape(shape) % 5 + rank
    return values.to(dtype)


@pytest.mark.parametrize("dtype", REDUCED)
def test_allreduce_in_its_forms(rank: int, size: int, dtype: torch.dtype) -> None:
    x = of(rank, dtype)
    total = sum(of(other, dtype) for other in range(size))
    mean = torch.div(total.double(), size, rounding_mode=None if dtype.is_floating_point else "trunc").to(dtype)
    assert torch.equal(hvd.allreduce(x, op=hvd.Sum), total)
    assert torch.allclose(hvd.allreduce(x).double(), mean.double(), rtol=1e-2 if dtype.itemsize == 2 else 1e-6)
    assert torch.equal(hvd.synchronize(hvd.allreduce_async(x, op=hvd.Max, name="max")), of(size - 1, dtype))
    y = x.clone()
    assert hvd.allreduce_(y, op=hvd.Min) is y
    assert torch.equal(y, of(0, dtype))
    handle = hvd.allreduce_async_(y, op=hvd.Sum)
    assert isinstance(handle, int)
    assert hvd.synchronize(handle) is y
    assert torch.equal(y, of(0, dtype) * size)
    both = hvd.grouped_allreduce([x, x[0].contiguous()], op=hvd.Sum)
    assert torch.equal(both[0], total)
    assert torch.equal(both[1], total[0])


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average])
@pytest.mark.parametrize("dtype", REDUCED)
def test_factors(rank: int, size: int, dtype: torch.dtype, op: int) -> None:
    x = of(rank, dtype) * 8
    wide = torch.float64 if not dtype.is_floating_point else torch.float32 if dtype.itemsize == 2 else dtype
    total = sum((of(other, dtype) * 8).to(wide).mul(0.25).to(dtype) for other in range(size))
    expected = (total.to(wide) * (0.5 if op == hvd.Sum else 0.5 / size)).to(dtype)
    found = hvd.allreduce(x, op=op, prescale_factor=0.25, postscale_factor=0.5)
    assert found.dtype is dtype
    assert torch.allclose(found.double(), expected.double(), rtol=1e-2 if dtype.itemsize == 2 else 1e-6)
    in_place = x.clone()
    hvd.allreduce_(in_place, op=op, prescale_factor=0.25, postscale_factor=0.5)
    assert torch.equal(in_place, found)


@pytest.mark.parametrize("dtype", MOVED)
def test_gather_broadcast_and_alltoall(rank: int, size: int, dtype: torch.dtype) -> None:
    x = torch.full((rank + 1, 2), rank, dtype=dtype)
    rows = torch.cat([torch.full((other + 1, 2), other, dtype=dtype) for other in range(size)])
    assert torch.equal(hvd.allgather(x), rows)
    assert torch.equal(hvd.synchronize(hvd.allgather_async(x)), rows)
    pair = hvd.grouped_allgather([x, x[:1].contiguous()])
    assert torch.equal(pair[0], rows)
    assert pair[1].shape == (size, 2)
    root = size - 1
    assert torch.equal(hvd.broadcast(torch.full((3,), rank, dtype=dtype), root), torch.full((3,), root, dtype=dtype))
    y = torch.full((3,), rank, dtype=dtype)
    assert hvd.synchronize(hvd.broadcast_async_(y, root)) is y
    assert torch.equal(y, torch.full((3,), root, dtype=dtype))
    # Rank r sends s + 1 rows to rank s.
    splits = torch.arange(1, size + 1, dtype=torch.int32)
    sent = torch.full((int(splits.sum()), 2), rank, dtype=dtype)
    expected = torch.cat([torch.full((rank + 1, 2), other, dtype=dtype) for other in range(size)])
    for result, counts in (hvd.alltoall(sent, splits), hvd.synchronize(hvd.alltoall_async(sent, splits.tolist()))):
        assert torch.equal(result, expected)
        assert counts.tolist() == [rank + 1] * size
        assert counts.dtype is torch.int32
    equal = hvd.alltoall(torch.full((size,), rank, dtype=dtype))
    assert torch.equal(equal, torch.arange(size).to(dtype))


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("dtype", REDUCED)
def test_reducescatter_gives_the_first_ranks_a_row_more(rank: int, size: int, dtype: torch.dtype, extra: int) -> None:
    shape = (2 * size + extra, 3)
    total = sum(of(other, dtype, shape) for other in range(size))
    begin = 2 * rank + min(rank, extra)
    mine = total[begin : begin + 2 + (rank < extra)]
    assert torch.equal(hvd.reducescatter(of(rank, dtype, shape), op=hvd.Sum), mine)
    assert torch.equal(hvd.synchronize(hvd.reducescatter_async(of(rank, dtype, shape), op=hvd.Sum)), mine)
    blocks = hvd.grouped_reducescatter([of(rank, dtype, shape), of(rank, dtype, (size,))], op=hvd.Sum)
    assert torch.equal(blocks[0], mine)
    assert torch.equal(blocks[1], sum(of(other, dtype, (size,)) for other in range(size))[rank : rank + 1])
    scaled = hvd.reducescatter(of(rank, dtype, shape) * 2, op=hvd.Sum, prescale_factor=0.5)
    assert torch.equal(scaled, mine)


def gradient(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, weight: float) -> torch.Tensor:
    x = x.clone().requires_grad_()
    (function(x).sum() * weight).backward()
    assert x.grad is not None
    return x.grad


def test_gradients_are_those_of_horovod(rank: int, size: int) -> None:
    weights = [other + 1.0 for other in range(size)]
    total, mean, weight = sum(weights), sum(weights) / size, rank + 1.0
    x = torch.ones(2 * size, 2)

    def check(function: Callable[[torch.Tensor], torch.Tensor], expected: float) -> None:
        found = gradient(function, x, weight)
        assert torch.allclose(found, torch.full_like(x, expected)), (found, expected)

    check(lambda t: hvd.allreduce(t, op=hvd.Sum), total)
    check(lambda t: hvd.allreduce(t), mean)
    check(lambda t: hvd.allreduce(t, op=hvd.Sum, prescale_factor=0.5, name="scaled"), total / 2)
    check(lambda t: hvd.grouped_allreduce([t, t], op=hvd.Sum)[1], total)
    check(lambda t: hvd.allgather(t), mean)
    check(lambda t: hvd.grouped_allgather([t, t])[0], mean)
    check(lambda t: hvd.broadcast(t, 0), mean if rank == 0 else 0.0)
    own = torch.cat([torch.full((2, 2), each) for each in weights])
    assert torch.equal(gradient(lambda t: hvd.alltoall(t), x, weight), own)
    assert torch.equal(gradient(lambda t: hvd.reducescatter(t, op=hvd.Sum), x, weight), own * size)
    assert torch.equal(gradient(lambda t: hvd.reducescatter(t, postscale_factor=0.5), x, weight), own / 2)
    assert torch.equal(gradient(lambda t: hvd.grouped_reducescatter([t])[0], x, weight), own)
    # Rows of other lengths, and a list of splits that leaves rows out.
    assert torch.allclose(gradient(hvd.allgather, torch.ones(rank + 1), weight), torch.full((rank + 1,), mean))
    some = gradient(lambda t: hvd.alltoall(t, [1] * size)[0], x, weight)
    assert torch.equal(some[:size], torch.tensor(weights)[:, None].expand(size, 2))
    assert torch.equal(some[size:], torch.zeros(size, 2))


def test_a_blocking_call_matches_a_started_one(rank: int, size: int) -> None:
    x = torch.full((2 * size, 2), float(rank))
    calls: list[tuple[Callable[..., Any], Callable[..., int]]] = [
        (hvd.allreduce, hvd.allreduce_async),
        (hvd.allreduce_, hvd.allreduce_async_),
        (hvd.grouped_allreduce, hvd.grouped_allreduce_async),
        (hvd.allgather, hvd.allgather_async),
        (hvd.grouped_allgather, hvd.grouped_allgather_async),
        (hvd.alltoall, hvd.alltoall_async),
        (hvd.reducescatter, hvd.reducescatter_async),
        (lambda t, name=None: hvd.broadcast(t, 0, name), lambda t, name=None: hvd.broadcast_async(t, 0, name)),
        (lambda t, name=None: hvd.broadcast_(t, 0, name), lambda t, name=None: hvd.broadcast_async_(t, 0, name)),
    ]
    for i, (blocking, started) in enumerate(calls):
        for name in (None, f"call{i}"):
            given = (
                [x.clone(), x[: size + 1].clone()] if blocking in (hvd.grouped_allreduce, hvd.grouped_allgather) else x
            )
            result = hvd.synchronize(started(given, name=name)) if rank % 2 else blocking(given, name=name)
            assert result is not None


def test_names_match_in_another_order(rank: int, size: int) -> None:
    names = [f"n{i}" for i in range(6)]
    mine = names if rank % 2 == 0 else names[::-1]
    handles = {name: hvd.allreduce_async(torch.full((int(name[1]) + 1,), 1.0), name=name, op=hvd.Sum) for name in mine}
    for name in names:
        assert torch.equal(hvd.synchronize(handles[name]), torch.full((int(name[1]) + 1,), float(size)))


def test_a_name_is_busy_for_a_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horovod.common._calls._cycle_s", 0.2)
    first = hvd.allreduce_async(torch.ones(2), name="busy")
    with pytest.raises(ValueError, match="allreduce.busy is in progress"):
        hvd.allreduce_async(torch.ones(2), name="busy")
    with pytest.raises(ValueError, match="in progress"):
        hvd.allreduce(torch.ones(2), name="busy")
    assert not hvd.poll(first)
    polled: list[bool] = []
    thread = threading.Thread(target=lambda: polled.append(hvd.poll(first)))
    thread.start()
    thread.join()
    assert polled == [False]
    until = time.monotonic() + 20
    while not hvd.poll(first):
        assert time.monotonic() < until
        time.sleep(0.01)
    # It may be taken again now, and after `synchronize` at once.
    second = hvd.allreduce_async(torch.ones(2), name="busy")
    hvd.synchronize(second)
    third = hvd.allreduce_async(torch.ones(2), name="busy")
    assert hvd.synchronize(third) is not None
    assert hvd.synchronize(third) is None
    assert torch.equal(hvd.synchronize(first), torch.ones(2))
    with pytest.raises(ValueError, match="handle"):
        hvd.poll(first)


def test_wrong_arguments_are_refused_at_the_call(size: int) -> None:
    x = torch.ones(4, 4)
    wrong: list[Callable[[], Any]] = [
        lambda: hvd.allreduce(x.t()),
        lambda: hvd.allreduce(torch.ones(3, dtype=torch.complex64), op=hvd.Max),
        lambda: hvd.allreduce([1.0]),  # type: ignore[arg-type]
        lambda: hvd.allreduce(x, average=True, op=hvd.Sum),
        lambda: hvd.allreduce(x, op=17),
        lambda: hvd.grouped_allreduce_([]),
        lambda: hvd.alltoall(torch.ones(size + 1 if size > 1 else 1), [2] * size),
        lambda: hvd.alltoall(x, torch.ones(size)),
        lambda: hvd.broadcast(x, size),
        lambda: hvd.broadcast_object(1, -1),
        lambda: hvd.allreduce(x, process_set=hvd.ProcessSet([0])),
        lambda: hvd.ProcessSet([0.5]),  # type: ignore[list-item]
    ]
    if size > 1:
        wrong.append(lambda: hvd.alltoall(torch.ones(size + 1)))
    for call in wrong:
        with pytest.raises(ValueError):
            call()
    for call in (lambda: hvd.reducescatter(torch.ones(())), lambda: hvd.reducescatter(x, op=hvd.Max)):
        with pytest.raises(RuntimeError):
            call()
    assert torch.equal(hvd.allreduce(x), x)


def test_deprecated_arguments_warn_where_they_are_given(size: int) -> None:
    x, parameter = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    deprecated: list[Callable[[], Any]] = [
        lambda: hvd.allreduce(x, average=False),
        lambda: hvd.synchronize(hvd.allreduce_async(x, average=False)),
        lambda: hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1), num_groups=1),
    ]
    for call in deprecated:
        with pytest.warns(DeprecationWarning, match="is deprecated: use") as found:
            result = call()
        assert [warning.filename for warning in found] == [__file__]
        if isinstance(result, torch.Tensor):
            assert torch.equal(result, x * size)


def test_ranks_that_differ_get_an_error_and_go_on(rank: int, size: int) -> None:
    if size == 1:
        pytest.skip("needs several ranks")
    x = torch.ones(6, 2)
    different: list[Callable[[], Any]] = [
        lambda: hvd.allreduce(torch.ones(3 + rank)),
        lambda: hvd.allreduce(x.to([torch.float32, torch.int32][rank % 2])),
        lambda: hvd.allreduce(x, op=[hvd.Sum, hvd.Max][rank % 2], name="op"),
        lambda: hvd.allgather(torch.ones(2, 2 + rank)),
        lambda: hvd.allgather(x.to([torch.float32, torch.int32][rank % 2])),
        lambda: hvd.broadcast(x, rank % 2),
        lambda: hvd.alltoall(torch.ones(2 * size, 2 + rank)),
        lambda: hvd.synchronize(hvd.reducescatter_async(torch.ones(6 + rank, 2), op=hvd.Sum)),
        lambda: hvd.synchronize(hvd.allgather_async(torch.ones(2, 2 + rank))),
    ]
    for call in different:
        begin = time.monotonic()
        with pytest.raises(hvd.HorovodInternalError):
            call()
        assert time.monotonic() - begin < 5  # about one, but the processors may be busy
        assert torch.equal(hvd.allreduce(x), x)


def test_process_sets(rank: int, size: int) -> None:
    evens, odds = ([other for other in range(size) if other % 2 == part] for part in (0, 1))
    if size == 1:
        pytest.skip("needs several ranks")
    sets = [hvd.add_process_set(evens) if len(evens) < size else None, hvd.add_process_set(hvd.ProcessSet(odds))]
    mine, ranks = (sets[0], evens) if rank % 2 == 0 else (sets[1], odds)
    assert mine is not None
    assert mine.included()
    assert (mine.size(), mine.rank(), mine.ranks) == (len(ranks), ranks.index(rank), ranks)
    total = hvd.allreduce(torch.full((3,), float(rank)), op=hvd.Sum, process_set=mine)
    assert torch.equal(total, torch.full((3,), float(sum(ranks))))
    assert torch.equal(hvd.broadcast(torch.tensor([rank]), ranks[-1], process_set=mine), torch.tensor([ranks[-1]]))
    assert hvd.broadcast_object({"rank": rank}, ranks[0], process_set=mine) == {"rank": ranks[0]}
    hvd.barrier(mine)
    other = sets[1] if rank % 2 == 0 else sets[0]
    with pytest.raises(ValueError, match="is not in process set"):
        hvd.allreduce(torch.ones(1), process_set=other)
    with pytest.raises(ValueError, match="already"):
        hvd.add_process_set(odds[::-1])
    with pytest.raises(hvd.HorovodInternalError, match="different"):
        hvd.add_process_set([rank])
    for each in sets:
        assert each is not None
        assert hvd.remove_process_set(each)
        assert not hvd.remove_process_set(each)
        assert each.size() is None
    with pytest.raises(ValueError):
        hvd.allreduce(torch.ones(1), process_set=sets[1])
    assert not hvd.remove_process_set(hvd.global_process_set)


def test_sparse_allreduce(rank: int, size: int) -> None:
    tensors = [torch.zeros(5, 2) for _ in range(size)]
    for other, tensor in enumerate(tensors):
        tensor[other % 5] = other + 1.0
        tensor[4] = 2.0
    for op, divisor in ((hvd.Sum, 1), (hvd.Average, size)):
        result = hvd.sparse_allreduce_async(tensors[rank].to_sparse(1), f"sparse{op}", op)
        assert torch.allclose(result().to_dense(), sum(tensors) / divisor)


def test_join_gives_zeros(rank: int, size: int) -> None:
    # Rank r has r + 1 batches.
    for step in range(rank + 1):
        active = [other for other in range(size) if other >= step]
        x = torch.full((4,), rank + 1.0)
        total = torch.full((4,), sum(other + 1.0 for other in active))
        assert torch.equal(hvd.allreduce(x, op=hvd.Sum, name=f"step{step}"), total)
        pair = hvd.grouped_allreduce([x, x[:2].clone()], name=f"pair{step}")
        assert torch.allclose(pair[1], total[:2] / size)
    assert hvd.join() == size - 1
    assert torch.equal(hvd.allreduce(torch.ones(1)), torch.ones(1))


def test_objects(rank: int, size: int) -> None:
    function = hvd.broadcast_object(lambda: f"of rank {rank}" if rank else "of rank 0")
    assert function() == "of rank 0"
    assert [each() for each in hvd.allgather_object(lambda: rank)] == list(range(size))
    last = hvd.broadcast_object([rank], root_rank=size - 1, name="last")
    assert last == [size - 1]


def test_ranks_and_what_is_built(rank: int, size: int) -> None:
    assert hvd.is_initialized()
    assert hvd.global_process_set.ranks == list(range(size))
    assert hvd.global_process_set.rank() == rank
    assert (hvd.local_size(), hvd.cross_size(), hvd.cross_rank()) == (size, 1, 0)
    assert hvd.mpi_ops.is_homogeneous()  # type: ignore[attr-defined]
    assert hvd.gloo_enabled() != hvd.mpi_enabled()
    assert hvd.mpi_built()
    assert hvd.gloo_built()
    assert not hvd.ccl_built()


def test_batch_normalization_on_the_cpu(rank: int, size: int) -> None:
    torch.manual_seed(0)
    batch = torch.randn(4 * size, 3)
    mine, whole = hvd.SyncBatchNorm(3), torch.nn.BatchNorm1d(3)
    part = batch[4 * rank : 4 * rank + 4]
    assert torch.allclose(mine(part), whole(batch)[4 * rank : 4 * rank + 4], atol=1e-5)
    assert torch.allclose(mine.running_var, whole.running_var)
