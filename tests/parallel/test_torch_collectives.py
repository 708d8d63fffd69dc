"""Every collective on torch tensors, on 1, 2, 3 ranks: values, groups, handles, gradients, bad input."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import dl_comm  # noqa: E402
import dl_comm.torch as cdl  # noqa: E402
from dl_comm.torch import _messages  # noqa: E402

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64]
COMPLEX = [torch.complex64, torch.complex128]
ALL = [*FLOATS, *INTEGERS, *COMPLEX, torch.bool]
LENGTHS = [0, 1, 7, 1000]


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small numbers, other ones on each rank."""
    return ((torch.arange(torch.Size(shape).numel()) * 3 + rank) % 7 + 1).reshape(shape).to(dtype)


def equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether type, shape and values are the same; torch has no comparison of some types."""
    wide = torch.complex128 if found.is_complex() else torch.float64
    return found.dtype == expected.dtype and torch.equal(found.to(wide), expected.to(wide))


def folded(op: Callable[..., torch.Tensor], tensors: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Combine tensors on one process, in a type that holds all results."""
    result = tensors[0]
    for tensor in tensors[1:]:
        result = op(result, tensor)
    return result.to(dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *COMPLEX], ids=str)
def test_allreduce_of_every_type(rank: int, size: int, dtype: torch.dtype) -> None:
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    operators: dict[str, Any] = {"sum": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum}
    if dtype.is_complex:
        operators = {"sum": torch.add}
    elif not dtype.is_floating_point:
        operators |= {"bit_and": torch.bitwise_and, "bit_or": torch.bitwise_or, "bit_xor": torch.bitwise_xor}
    for op, reference in operators.items():
        for length in LENGTHS:
            mine = values(rank, (length,), dtype)
            expected = folded(reference, [values(other, (length,), dtype).to(wide) for other in range(size)], dtype)
            assert equal(cdl.allreduce(mine, op), expected), (op, length)
            assert equal(mine, values(rank, (length,), dtype)), "the argument stays as it is"
            if op == "sum":
                block = cdl.reduce_scatter(expected.new_empty(0) if not length else torch.cat([mine] * size), op)
                assert equal(block, expected)
                for root in range(size):
                    found = cdl.reduce(mine, root, op)
                    assert found is None if rank != root else equal(found, expected)


def test_means_and_bools(rank: int, size: int) -> None:
    assert cdl.allreduce(torch.tensor([rank, -rank]), "mean").tolist() == [(size - 1) // 2, -((size - 1) // 2)]
    assert cdl.allreduce(torch.tensor([rank == 0, True]), "bit_and").tolist() == [size == 1, True]
    assert cdl.allreduce(torch.tensor([rank == 0, False]), "bit_or").tolist() == [True, False]


def test_numbers_keep_their_types(rank: int, size: int) -> None:
    total = size * (size - 1) // 2
    assert cdl.allreduce(rank) == total
    assert isinstance(cdl.allreduce(rank), int)
    assert cdl.allreduce(rank + 0.5, "max") == size - 0.5
    assert cdl.allreduce(complex(rank, 1)) == complex(total, size)
    assert cdl.all_gather(rank).tolist() == list(range(size))
    assert cdl.allreduce(np.float32(rank)) == total
    assert cdl.allreduce(rank == 0, "bit_or") is True
    assert cdl.reduce(1, size - 1) == (size if rank == size - 1 else None)
    scalar = cdl.allreduce(torch.tensor(1.5))
    assert scalar.shape == ()
    assert scalar == 1.5 * size


def test_lists_outputs_and_factors(rank: int, size: int) -> None:
    tensors = [torch.full((3,), float(rank)), torch.full((2, 2), 2 * rank), torch.zeros(0, dtype=torch.float64)]
    total = size * (size - 1) // 2
    found = cdl.allreduce(tensors)
    assert [tensor.shape for tensor in found] == [(3,), (2, 2), (0,)]
    assert (found[0] == total).all()
    assert (found[1] == 2 * total).all()
    assert (cdl.allreduce(torch.ones(5), prescale=2.0, postscale=0.5) == size).all()
    assert torch.allclose(cdl.allreduce(torch.ones(5), "adasum"), torch.ones(5))
    out = torch.empty(3)
    version = out._version
    assert cdl.allreduce(tensors[0], out=out) is out
    assert out._version > version
    assert cdl.allreduce(out, "max", out=out) is out
    assert (out == total).all()
    assert cdl.allreduce(tensors, "max", out=tensors) is tensors
    assert (tensors[1] == 2 * (size - 1)).all()
    joined = torch.empty(size, 2)
    cdl.all_gather(torch.full((1, 2), float(rank)), out=joined)
    assert torch.equal(joined, torch.arange(float(size)).repeat(2, 1).t())
    weight = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert cdl.allreduce(weight, out=weight) is weight
    assert weight.tolist() == [size, size]
    gathered = torch.empty(size) if rank == 0 else None
    assert cdl.gather(torch.tensor([float(rank)]), out=gathered) is gathered


def test_strided_and_conjugate_inputs(rank: int, size: int) -> None:
    columns = (torch.arange(6.0).reshape(2, 3) + rank).t()
    found = cdl.allreduce(columns)
    assert found.is_contiguous()
    assert torch.equal(found, size * torch.arange(6.0).reshape(2, 3).t() + size * (size - 1) // 2)
    pending = torch.full((3,), 1 + 2j).conj()
    assert torch.equal(cdl.allreduce(pending), torch.full((3,), size * (1 - 2j)))
    assert torch.equal(cdl.all_gather(pending.imag), torch.full((3 * size,), -2.0))
    assert torch.equal(cdl.allreduce(torch.ones(1).expand(4)), torch.full((4,), float(size)))


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_data_moves_in_every_type(rank: int, size: int, dtype: torch.dtype) -> None:
    for length in (0, 1, 1000):
        mine = values(rank, (length, 2), dtype)
        joined = torch.cat([values(other, (length, 2), dtype) for other in range(size)])
        assert equal(cdl.all_gather(mine), joined)
        for root in range(size):
            found = cdl.gather(mine, root)
            assert found is None if rank != root else equal(found, joined)
            block = torch.empty((length, 2), dtype=dtype)
            assert cdl.scatter(joined if rank == root else None, root, out=block) is block
            assert equal(block, mine)
            assert equal(cdl.scatter(joined if rank == root else torch.empty_like(joined), root), mine)
            (copy,) = cdl.broadcast([mine.clone()], root, in_place=False)
            assert equal(copy, values(root, (length, 2), dtype))
        spread = torch.cat([values(rank + 10 * other, (length,), dtype) for other in range(size)])
        expected = torch.cat([values(other + 10 * rank, (length,), dtype) for other in range(size)])
        assert equal(cdl.all_to_all(spread), expected)


@pytest.mark.parametrize("length", [*LENGTHS, 300_000])
def test_an_allreduce_is_a_gathered_reduce_scatter(rank: int, size: int, length: int) -> None:
    tensor = torch.randn(length * size, generator=torch.Generator().manual_seed(rank))
    for op in ("sum", "mean", "min"):
        block = cdl.reduce_scatter(tensor, op)
        assert block.shape == (length,)
        assert torch.equal(cdl.all_gather(block), cdl.allreduce(tensor, op))


def test_blocks_of_different_lengths(rank: int, size: int) -> None:
    counts = [3 * other for other in range(size)]
    joined = torch.cat([values(other, (3 * other, 2), torch.float32) for other in range(size)])
    mine = values(rank, (3 * rank, 2), torch.float32)
    assert torch.equal(cdl.all_gather(mine, counts=counts), joined)
    assert torch.equal(cdl.all_gather(mine, ragged=True), joined)
    found = cdl.gather(mine, size - 1, ragged=True)
    assert found is None if rank != size - 1 else torch.equal(found, joined)
    block = torch.empty((3 * rank, 2))
    cdl.scatter(joined if rank == 0 else None, out=block, counts=counts)
    assert torch.equal(block, mine)
    assert torch.equal(cdl.scatter(joined, counts=counts), mine)
    assert torch.equal(cdl.reduce_scatter(joined, counts=counts), size * mine)
    # Rank s sends r + 1 numbers to rank r.
    sent = torch.cat([torch.full((other + 1,), 10 * rank + other) for other in range(size)])
    received = cdl.all_to_all(sent, send_counts=[other + 1 for other in range(size)])
    assert received.tolist() == [10 * other + rank for other in range(size) for _ in range(rank + 1)]


def test_handles_end_in_any_order(rank: int, size: int) -> None:
    tensors = [torch.full((50_000,), float(index + rank)) for index in range(6)]
    works = [cdl.allreduce(tensor, async_op=True) for tensor in tensors]
    assert isinstance(works[0], dl_comm.Work)
    total = size * (size - 1) // 2
    for index in (5, 0, 3):
        assert (works[index].wait() == size * index + total).all()
        assert works[index].test()
        assert (works[index].wait(timeout=60) == size * index + total).all()
    # The others are dropped; they keep their tensors until they have ended.
    del works, tensors
    gc.collect()
    cdl.barrier()
    results = [torch.empty(size, dtype=torch.int64), torch.empty(size)]
    gathered = cdl.all_gather([torch.tensor([rank]), torch.ones(1)], out=results, async_op=True)
    assert gathered.wait() is results
    assert results[0].tolist() == list(range(size))
    (tensor,) = [torch.full((1000,), float(rank))]
    assert (cdl.broadcast([tensor], size - 1, async_op=True).wait()[0] == size - 1).all()


def test_dropped_handles_release_their_tensors(rank: int, size: int) -> None:
    alive = []
    for _ in range(20):
        tensor = torch.ones(1000)
        alive.append(weakref.ref(tensor.untyped_storage()))
        cdl.allreduce(tensor, out=tensor, async_op=True)
        del tensor
    cdl.barrier()
    for _ in range(100):
        cdl.allreduce(1, async_op=True).wait()
        gc.collect()
        if not any(reference() is not None for reference in alive):
            break
    assert not any(reference() is not None for reference in alive)


def test_handles_are_awaitable(rank: int, size: int) -> None:
    async def program() -> list[Any]:
        works = [cdl.allreduce(torch.full((1000,), index + rank), async_op=True) for index in range(4)]
        return list(await asyncio.gather(*works))

    for index, found in enumerate(asyncio.run(program())):
        assert (found == size * index + size * (size - 1) // 2).all()


@pytest.mark.parametrize("copied", [False, True], ids=["in place", "copied"])
def test_messages(rank: int, size: int, copied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if copied:  # as tensors of a GPU
        monkeypatch.setattr(_messages, "_on_host", lambda tensor: False)
    following, before = (rank + 1) % size, (rank - 1) % size
    for length in (0, 5, 100_000):
        out = torch.full((length,), -1.0)
        status = cdl.sendrecv(torch.full((length,), float(rank)), following, out, before, send_tag=3)
        assert status == (before, 3, 4 * length)
        assert (out == before).all()
    if rank == 0:
        found = []
        for _ in range(size - 1):
            number = torch.empty(1, dtype=torch.int16)
            status = cdl.recv(number, tag=7)
            found.append((status.source, int(number)))
        assert sorted(found) == [(other, 2 * other) for other in range(1, size)]
    else:
        cdl.send(torch.tensor([2 * rank], dtype=torch.int16), 0, tag=7)
    pair = [torch.empty(100_000, dtype=torch.complex64), torch.empty(3)]
    received = cdl.recv(pair, before, async_op=True)
    sent = cdl.send([torch.full((100_000,), 1j * rank), torch.ones(6)[::2]], following, async_op=True)
    assert received.wait().source == before
    sent.wait()
    assert (pair[0] == 1j * before).all()
    assert (pair[1] == 1).all()
    # A shorter message leaves the rest as it is.
    pair = [torch.full((2, 2), -1.0), torch.full((3,), -1.0)]
    status = cdl.sendrecv(torch.full((5,), float(rank)), following, pair, before)
    assert status.bytes == 20
    assert (pair[0] == before).all()
    assert pair[1].tolist() == [before, -1, -1]
    received = cdl.recv(pair[1], before, async_op=True)
    cdl.send(torch.ones(3), following)
    assert received.wait().bytes == 12
    pair[1].zero_()
    assert received.wait().bytes == 12
    assert pair[1].tolist() == [0] * 3, "the second wait copies nothing"
    with pytest.raises(dl_comm.ArgumentError, match="contiguous"):
        cdl.recv(torch.ones(4)[::2], before)


def test_a_wait_that_ends_early_can_be_repeated(rank: int, size: int) -> None:
    if size == 1:
        return
    number = torch.empty(1)
    if rank == 0:
        work = cdl.recv(number, 1, tag=9, async_op=True)
        with pytest.raises(dl_comm.TimeoutError, match="goes on"):
            work.wait(timeout=0.05)
        assert not work.test()
        cdl.barrier()
        assert work.wait() == (1, 9, 4)
        assert number == 5
        return
    cdl.barrier()
    if rank == 1:
        cdl.send(torch.tensor([5.0]), 0, tag=9)


def test_groups(rank: int, size: int) -> None:
    with cdl.Group(name="all, backwards", ranks=range(size)[::-1]) as group:
        assert cdl.all_gather(torch.tensor([rank]), group=group).tolist() == list(range(size))[::-1]
        (tensor,) = [torch.tensor([rank])]
        assert cdl.broadcast([tensor], 0, group=group)[0] is tensor
        assert tensor == size - 1
        found = cdl.gather(torch.tensor([rank]), 0, group=group)
        assert found is None if group.rank else found.tolist() == list(range(size))[::-1]
    for call in (cdl.allreduce, cdl.all_gather):
        with pytest.raises(dl_comm.ArgumentError, match="freed"):
            call(torch.ones(size), group=group)
    if rank < 2 <= size:
        pair = cdl.Group([1, 0])
        assert cdl.all_gather(torch.tensor([rank]), group=pair).tolist() == [1, 0]
        x = torch.tensor([1.0 + rank, 2.0], requires_grad=True)
        cdl.reduce_scatter(x, group=pair).square().sum().backward()
        assert x.grad.tolist() == [6.0, 8.0]
        work = cdl.all_to_all(torch.tensor([rank, rank + 10]), group=pair, async_op=True)
        number = torch.empty(1)
        cdl.sendrecv(torch.tensor([float(rank)]), 1 - pair.rank, number, group=pair)
        assert number == 1 - rank
        assert work.wait().tolist() == ([1, 0] if rank else [11, 10])
        pair.free()
    parity = cdl.split(rank % 2)
    assert parity is not None
    same = [other for other in range(size) if other % 2 == rank % 2]
    assert cdl.allreduce(rank, group=parity) == sum(same)
    (total,) = [cdl.allreduce(torch.tensor([float(rank)], requires_grad=True), group=parity)]
    assert total == sum(same)
    assert cdl.allreduce(1) == size


def test_bad_arguments_change_nothing(rank: int, size: int) -> None:
    tensor = torch.ones(4)
    learned = torch.ones(4, requires_grad=True)
    for bad, text in [
        (lambda: cdl.allreduce(tensor, "avg"), "invalid op"),
        (lambda: cdl.allreduce(tensor, 0), "invalid op"),  # type: ignore[arg-type]
        (lambda: cdl.allreduce(tensor, "max", prescale=2.0), "factors of a sum"),
        (lambda: cdl.allreduce([]), "empty"),
        (lambda: cdl.allreduce(tensor, out=torch.ones(5)), r"out: tensor 0 has the shape \[5\]"),
        (lambda: cdl.allreduce(tensor, out=torch.ones(4, dtype=torch.float64)), "type Double; the result has .* Float"),
        (lambda: cdl.allreduce(tensor, out=torch.ones(8)[::2]), "not contiguous"),
        (lambda: cdl.allreduce([tensor], out=[tensor, tensor]), "has 1 tensors"),
        (lambda: cdl.allreduce(tensor.to_sparse()), "dense"),
        (lambda: cdl.allreduce(learned, out=learned), "not differentiable"),
        (lambda: cdl.allreduce(learned, async_op=True), "not differentiable"),
        (lambda: cdl.allreduce(tensor, out=learned), "not differentiable"),
        (lambda: cdl.send(learned, 0), "not differentiable"),
        (lambda: cdl.reduce(tensor, size), "invalid root"),
        (lambda: cdl.reduce(tensor, -1), "invalid root"),
        (lambda: cdl.reduce_scatter(torch.ones(size + 1) if size > 1 else torch.tensor(1.0)), "multiple"),
        (lambda: cdl.all_gather(tensor, counts=[4] * (size + 1)), "invalid counts"),
        (lambda: cdl.all_gather(tensor, counts=[5] * size), "for this rank"),
        (lambda: cdl.all_gather([tensor, tensor], counts=[4] * size), "one tensor"),
        (lambda: cdl.all_to_all(torch.ones(size), receive_counts=[1] * size), "send_counts"),
        (lambda: cdl.scatter(None), "out"),
        (lambda: cdl.scatter(None, rank, out=tensor), "empty"),
        (lambda: cdl.send(tensor, size), "rank"),
        (lambda: cdl.recv(tensor, tag=-1), "invalid tag"),
        (lambda: cdl.allreduce(tensor, group=3), "invalid group"),
        (lambda: cdl.allreduce(tensor, timeout=-1), "invalid timeout"),
        (lambda: cdl.broadcast([tensor], size, group=cdl.Group()), "invalid root"),
    ]:
        with pytest.raises(dl_comm.ArgumentError, match=text):
            bad()
    for wrong in ("text", None, object(), [1]):
        with pytest.raises(dl_comm.DTypeError):
            cdl.allreduce(wrong)
    for unknown in (torch.ones(2).to(torch.float8_e4m3fn), torch.ones(2, dtype=torch.bool)):
        with pytest.raises(dl_comm.DTypeError):
            cdl.allreduce(unknown, "min")
    assert (cdl.allreduce(tensor) == size).all()


def test_a_mismatch_is_an_error_on_every_rank_and_ends_nothing(rank: int, size: int) -> None:
    if size == 1:
        return
    with pytest.raises(dl_comm.MismatchError):
        cdl.allreduce(torch.ones(3 + (rank == 0)), name="differs")
    with pytest.raises(dl_comm.MismatchError):
        cdl.all_gather(torch.ones(2, dtype=torch.float64 if rank else torch.float32), async_op=True).wait()
    assert cdl.allreduce(1) == size


# Gradients. A linear collective A and its gradient G are adjoint: over all ranks, <A x, v> = <x, G v>.

Linear = Callable[[torch.Tensor, int, int], torch.Tensor]
LINEAR: dict[str, Linear] = {
    "allreduce": lambda x, rank, size: cdl.allreduce(x),
    "allreduce factors": lambda x, rank, size: cdl.allreduce(x, prescale=3.0),
    "allreduce mean": lambda x, rank, size: cdl.allreduce([x, x.sum()], "mean")[0],
    "all_gather": lambda x, rank, size: cdl.all_gather(x),
    "all_gather counts": lambda x, rank, size: cdl.all_gather(x[: rank + 1], counts=range(1, size + 1)),
    "all_gather scalar": lambda x, rank, size: cdl.all_gather(x.sum()),
    "reduce": lambda x, rank, size: cdl.reduce(x, size - 1),
    "reduce mean": lambda x, rank, size: cdl.reduce(x, 0, "mean"),
    "broadcast": lambda x, rank, size: cdl.broadcast([x], size - 1, in_place=False)[0],
    "reduce_scatter": lambda x, rank, size: cdl.reduce_scatter(x),
    "reduce_scatter factors": lambda x, rank, size: cdl.reduce_scatter(x, postscale=0.5),
    "reduce_scatter mean": lambda x, rank, size: cdl.reduce_scatter(x, "mean"),
    "reduce_scatter counts": lambda x, rank, size: cdl.reduce_scatter(x, counts=[12, *[0] * (size - 1)]),
    "all_to_all": lambda x, rank, size: cdl.all_to_all(x),
    "all_to_all counts": lambda x, rank, size: cdl.all_to_all(x[: size * (rank + 1)], send_counts=[rank + 1] * size),
    "gather": lambda x, rank, size: cdl.gather(x, size - 1),
    "gather counts": lambda x, rank, size: cdl.gather(x[: rank + 1], counts=range(1, size + 1)),
    "scatter": lambda x, rank, size: cdl.scatter(x, size - 1),
    "scatter counts": lambda x, rank, size: cdl.scatter(x, 0, counts=[12, *[0] * (size - 1)]),
}


def inner(x: torch.Tensor, y: torch.Tensor) -> complex:
    """Return the inner product of tensors that lie on all ranks."""
    return cdl.allreduce(complex((x * y.conj()).sum().detach()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("name", LINEAR)
def test_gradients_are_adjoint(rank: int, size: int, name: str, dtype: torch.dtype) -> None:
    if dtype.is_complex and name.endswith("factors"):
        return  # these are for real numbers
    torch.manual_seed(rank)
    x = torch.randn(12, 2, dtype=dtype, requires_grad=True)
    result = LINEAR[name](x, rank, size)
    v = torch.randn_like(result, requires_grad=True)
    (gradient,) = torch.autograd.grad(result, x, v, create_graph=True)
    expected = inner(result, v)
    assert expected == pytest.approx(inner(x, gradient))
    # The gradient is linear in v, and the collective is its adjoint.
    (again,) = torch.autograd.grad(gradient, v, x.detach())
    torch.testing.assert_close(again, result)


@pytest.mark.parametrize("op", ["min", "max", "product"])
def test_gradients_of_other_operators(rank: int, size: int, op: str) -> None:
    reference: Any = {"min": torch.amin, "max": torch.amax, "product": torch.prod}[op]
    for kind in range(2):
        # Kind 1 has equal values and zeros.
        rows = torch.stack([values(other, (8,), torch.float64) - 2 * kind for other in range(size)])
        rows[:, 0] = 0 if kind else 1
        weights = torch.arange(1.0, 9.0, dtype=torch.float64)
        all_rows = rows.clone().requires_grad_()
        single = (weights * reference(all_rows, 0) ** 2).sum()
        (expected,) = torch.autograd.grad(single, all_rows, create_graph=True)
        (expected_again,) = torch.autograd.grad((expected**2).sum(), all_rows)
        mine = rows[rank].clone().requires_grad_()
        # The loss is a sum over the ranks, of which this is one part.
        loss = (weights * cdl.allreduce(mine, op) ** 2).sum() / size
        (gradient,) = torch.autograd.grad(loss, mine, create_graph=True)
        torch.testing.assert_close(gradient, expected[rank])
        (again,) = torch.autograd.grad((gradient**2).sum(), mine)
        torch.testing.assert_close(again, expected_again[rank])


def test_what_has_no_gradient_is_an_error(rank: int, size: int) -> None:
    x = torch.ones(4 * size, requires_grad=True)
    for result in (
        cdl.allreduce(x, "adasum"),
        cdl.reduce(x, 0, "max"),
        cdl.reduce_scatter(x, "product"),
    ):
        with pytest.raises(dl_comm.ArgumentError, match="has no gradient"):
            result.sum().backward()
    mixed = cdl.allreduce([x, torch.ones(3, dtype=torch.int64)])
    assert not mixed[1].requires_grad
    mixed[0].sum().backward()
    assert (x.grad == size).all()
    assert not cdl.allreduce(x.detach()).requires_grad


def test_gradcheck(rank: int, size: int) -> None:
    """All ranks change the same element at once, so this works for what treats all ranks alike."""
    x = torch.arange(1.0, 5.0, dtype=torch.float64, requires_grad=True)
    for op in ("sum", "mean"):
        assert torch.autograd.gradcheck(lambda x, op=op: cdl.allreduce(x, op), x)
        assert torch.autograd.gradgradcheck(lambda x, op=op: cdl.allreduce(x, op) ** 2, x)


def test_large_results_use_memory_again(rank: int, size: int) -> None:
    given = torch.full((3 << 10, 1 << 10), float(rank))
    places = set()
    for step in range(6):
        mean = cdl.gradients([given], 0)[0]
        total = cdl.allreduce(given + step)
        joined = cdl.all_gather(given)
        assert (mean == (size - 1) / 2).all()
        assert (total == size * (size - 1) / 2 + size * step).all()
        assert (joined.view(size, -1) == torch.arange(size).view(size, 1)).all()
        assert (total.shape, total.dtype, total.device) == (given.shape, given.dtype, given.device)
        assert total.is_contiguous()
        places |= {result.data_ptr() for result in (mean, total, joined)}
        del mean, total, joined
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11):
        assert len(places) <= 6, "three results are alive at once"
    # Results that stay, and their views, are not used again.
    kept = [cdl.allreduce(given * step)[5] for step in range(4)]
    assert all((row == step * size * (size - 1) / 2).all() for step, row in enumerate(kept))
    x = given.clone().requires_grad_()
    y = cdl.allreduce(x)
    y.mul_(2).sum().backward()
    assert (x.grad == 2 * size).all()
    assert cdl.allreduce(torch.ones(1 << 20, 0)).shape == (1 << 20, 0)


@pytest.mark.parametrize("cartesian", [None, False])
def test_an_allreduce_goes_through_a_span(rank: int, size: int, cartesian: bool | None) -> None:
    dl_comm.push_communicator(int(rank > 0), cartesian=cartesian)
    ones = torch.ones(5, dtype=torch.float64)
    total = size * (size + 1) / 2
    with dl_comm.collective_span(0, 1):
        x = ((rank + 1) * ones).requires_grad_()
        y = cdl.allreduce(x)
        assert torch.equal(y, total * ones)
        (gradient,) = torch.autograd.grad((rank + 1) * (y * y).sum(), x, create_graph=True)
        assert torch.equal(gradient, total * 2 * y)
        (second,) = torch.autograd.grad(gradient.sum(), x)
        assert torch.allclose(second, 2 * total * size * ones)
        assert torch.allclose(cdl.allreduce(x.detach(), "mean"), total / size * ones)
        assert cdl.allreduce(rank, "max") == size - 1
        assert cdl.allreduce(torch.full([3], 3e4, dtype=torch.float16), "mean").tolist() == [3e4] * 3
        assert torch.allclose(cdl.allreduce(ones, prescale=2.0, postscale=0.5), size * ones)
        mixed = [torch.full([3], rank), torch.full([2], rank + 0.5, requires_grad=True)]
        sums = cdl.allreduce(mixed)
        assert sums[0].tolist() == [sum(range(size))] * 3
        sums[1].sum().backward()
        assert mixed[1].grad is not None
        assert mixed[1].grad.tolist() == [size] * 2
        out = torch.full([2], float(rank))
        assert cdl.allreduce(out, out=out) is out
        assert out.tolist() == [sum(range(size))] * 2
        assert torch.equal(cdl.allreduce(ones, async_op=True).wait(), size * ones)
        for wrong, match in (((3, "mean"), "flat"), ((x, "max"), "flat"), ((ones, "adasum"), "flat")):
            with pytest.raises(dl_comm.ArgumentError, match=match):
                cdl.allreduce(*wrong)
        with pytest.raises(dl_comm.ArgumentError, match="out"):
            cdl.allreduce(ones, out=torch.ones(4, dtype=torch.float64))
        compiled = torch.compile(lambda t: cdl.allreduce(t) * 2, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(ones), 2 * size * ones)
        assert torch.equal(compiled(x), 2 * total * ones)
        for allreduce, expected in ((compiled, 2 * size), (lambda t: cdl.allreduce(t.half(), "mean"), 1)):
            (gradient,) = torch.autograd.grad(allreduce(x).sum(), x)
            assert torch.equal(gradient, expected * ones)
    dl_comm.pop_communicator()


def test_calls_without_a_group_follow_the_communicators(rank: int, size: int) -> None:
    compiled = torch.compile(cdl.allreduce, fullgraph=True, backend="aot_eager")
    dl_comm.push_communicator(rank % 2)
    for allreduce in (cdl.allreduce, compiled):
        with dl_comm.set_communicator(1):
            assert allreduce(torch.ones(3)).tolist() == [len(range(rank % 2, size, 2))] * 3
        assert allreduce(torch.ones(3)).tolist() == [size] * 3
    dl_comm.pop_communicator()
    assert cdl.allreduce(torch.ones(3)).tolist() == [size] * 3


def test_shapes_of_blocks_must_match(rank: int, size: int) -> None:
    if size == 1:
        return
    x = torch.ones((2, 3) if rank == 0 else (3, 2))
    blocks = torch.ones((2 * size, 3) if rank == 0 else (3 * size, 2))
    for call, given in (
        (cdl.allreduce, x),
        (cdl.all_gather, x),
        (cdl.reduce_scatter, blocks),
        (cdl.all_to_all, blocks),
    ):
        with pytest.raises(dl_comm.MismatchError, match="2, 3"):
            call(given)
    assert cdl.allreduce(1) == size


def test_the_package_takes_tensors(rank: int, size: int) -> None:
    """Calls of `dl_comm` are those of `dl_comm.torch`: values, options and gradients."""
    x = values(rank, (2 * size, 3), torch.float32)
    pairs = [
        (dl_comm.allreduce(x, "max"), cdl.allreduce(x, "max")),
        (dl_comm.reduce([x], size - 1), cdl.reduce([x], size - 1)),
        (dl_comm.all_gather(x, counts=[2 * size] * size), cdl.all_gather(x)),
        (dl_comm.gather(x=x, root=0), cdl.gather(x)),
        (dl_comm.scatter(x, 0, out=None), cdl.scatter(x)),
        (dl_comm.reduce_scatter(x, postscale=0.5), cdl.reduce_scatter(x, postscale=0.5)),
        (dl_comm.all_to_all((x, x)), cdl.all_to_all([x, x])),
    ]
    for found, expected in pairs:
        assert type(found) is type(expected)
        found, expected = (each if isinstance(each, list) else [each] for each in (found, expected))
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    block = torch.empty(2, 3)
    given = None if rank else values(0, (2 * size, 3), torch.float32)
    assert dl_comm.scatter(given, out=block) is block
    assert equal(block, values(0, (2 * size, 3), torch.float32)[2 * rank : 2 * rank + 2])
    work = dl_comm.allreduce(block, out=block, async_op=True)
    assert work.wait() is block
    assert dl_comm.broadcast([block], async_op=True).wait()[0] is block
    other = torch.empty(2, 3)
    status = dl_comm.sendrecv(block + rank, (rank + 1) % size, other, (rank - 1) % size)
    assert (status.source, other[0, 0] - block[0, 0]) == ((rank - 1) % size, (rank - 1) % size)
    leaf = torch.ones(3, requires_grad=True)
    dl_comm.allreduce(leaf).sum().backward()
    assert leaf.grad.tolist() == [size] * 3


def test_tangents_are_refused() -> None:
    """By torch they would be dropped, silently."""
    calls: list[Callable[[torch.Tensor], Any]] = [
        cdl.allreduce,
        lambda x: cdl.allreduce(x, out=x),
        lambda x: cdl.allreduce(x, async_op=True),
        cdl.all_gather,
        cdl.average,
        lambda x: cdl.gradients([x]),
        lambda x: cdl.broadcast([x]),
        lambda x: cdl.broadcast([x], in_place=False),
        lambda x: cdl.send(x, 0),
    ]
    for function in calls:
        with torch.autograd.forward_ad.dual_level(), pytest.raises(dl_comm.ArgumentError, match="tangent"):
            function(torch.autograd.forward_ad.make_dual(torch.ones(2), torch.ones(2)))
    with pytest.raises(dl_comm.ArgumentError, match="tangent"):
        torch.func.jvp(cdl.allreduce, (torch.ones(2),), (torch.ones(2),))
