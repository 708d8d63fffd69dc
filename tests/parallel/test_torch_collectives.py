"""What only torch has in the collectives: strides, autograd, tangents, the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import dl_comm  # noqa: E402
import dl_comm.torch as cdl  # noqa: E402


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small numbers, other ones on each rank."""
    return ((torch.arange(torch.Size(shape).numel()) * 3 + rank) % 7 + 1).reshape(shape).to(dtype)


def test_results_that_are_written_count_as_changes(rank: int, size: int) -> None:
    given, out = torch.full((3,), float(rank)), torch.empty(3)
    version = out._version
    assert cdl.allreduce(given, out=out) is out
    assert out._version > version
    weight = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert cdl.allreduce(weight, out=weight) is weight
    assert weight.tolist() == [size, size]


def test_strided_and_conjugate_inputs(rank: int, size: int) -> None:
    columns = (torch.arange(6.0).reshape(2, 3) + rank).t()
    found = cdl.allreduce(columns)
    assert found.is_contiguous()
    assert torch.equal(found, size * torch.arange(6.0).reshape(2, 3).t() + size * (size - 1) // 2)
    pending = torch.full((3,), 1 + 2j).conj()
    assert torch.equal(cdl.allreduce(pending), torch.full((3,), size * (1 - 2j)))
    assert torch.equal(cdl.all_gather(pending.imag), torch.full((3 * size,), -2.0))
    assert torch.equal(cdl.allreduce(torch.ones(1).expand(4)), torch.full((4,), float(size)))
    received = torch.empty(3)
    cdl.sendrecv(torch.arange(6.0)[::2], rank, received)
    assert received.tolist() == [0, 2, 4]


def test_bad_arguments_change_nothing(rank: int, size: int) -> None:
    tensor = torch.ones(4)
    learned = torch.ones(4, requires_grad=True)
    for bad, text in [
        (lambda: cdl.allreduce(tensor.to_sparse()), "dense"),
        (lambda: cdl.allreduce(learned, out=learned), "not differentiable"),
        (lambda: cdl.allreduce(learned, async_op=True), "not differentiable"),
        (lambda: cdl.allreduce(tensor, out=learned), "not differentiable"),
        (lambda: cdl.send(learned, 0), "not differentiable"),
        (lambda: cdl.send(torch.ones(2, device="meta"), 0), "neither in host memory"),
        (lambda: cdl.recv(tensor[::2], rank), "contiguous"),
        (lambda: cdl.scatter(None), "out"),
        (lambda: cdl.scatter(None, rank, out=tensor), "empty"),
    ]:
        with pytest.raises(dl_comm.ArgumentError, match=text):
            bad()
    for wrong in ([1], [None], torch.ones(2).to(torch.float8_e4m3fn), np.ma.masked_array([1.0], [True])):
        with pytest.raises(dl_comm.DTypeError):
            cdl.allreduce(wrong)
    with pytest.raises(dl_comm.DTypeError, match="name"):
        cdl.allreduce(tensor, name=3)  # type: ignore[arg-type]
    assert (cdl.allreduce(tensor) == size).all()


@pytest.mark.parametrize("op", ["min", "max", "product"])
def test_gradients_of_ties_and_zeros(rank: int, size: int, op: str) -> None:
    """Against autograd of one process, up to the second derivative."""
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


def test_what_needs_no_gradient(rank: int, size: int) -> None:
    x = torch.ones(4 * size, requires_grad=True)
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


def test_large_results_can_be_changed_in_place(rank: int, size: int) -> None:
    x = torch.full((3 << 10, 1 << 10), float(rank), requires_grad=True)
    cdl.allreduce(x).mul_(2).sum().backward()
    assert (x.grad == 2 * size).all()


@pytest.mark.parametrize("cartesian", [None, False])
def test_a_compiled_allreduce_goes_through_a_span(rank: int, size: int, cartesian: bool | None) -> None:
    dl_comm.push_communicator(int(rank > 0), cartesian=cartesian)
    ones = torch.ones(5, dtype=torch.float64)
    with dl_comm.collective_span(0, 1):
        x = ((rank + 1) * ones).requires_grad_()
        compiled = torch.compile(lambda t: cdl.allreduce(t) * 2, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(ones), 2 * size * ones)
        assert torch.equal(compiled(x), size * (size + 1) * ones)
        for allreduce, expected in ((compiled, 2 * size), (lambda t: cdl.allreduce(t.half(), "mean"), 1)):
            (gradient,) = torch.autograd.grad(allreduce(x).sum(), x)
            assert torch.equal(gradient, expected * ones)
        with pytest.raises(dl_comm.ArgumentError, match="flat"):
            cdl.allreduce(x, "max")
    dl_comm.pop_communicator()


def test_compiled_calls_without_a_group_follow_the_communicators(rank: int, size: int) -> None:
    compiled = torch.compile(cdl.allreduce, fullgraph=True, backend="aot_eager")
    dl_comm.push_communicator(rank % 2)
    with dl_comm.set_communicator(1):
        assert compiled(torch.ones(3)).tolist() == [len(range(rank % 2, size, 2))] * 3
    assert compiled(torch.ones(3)).tolist() == [size] * 3
    dl_comm.pop_communicator()
    assert compiled(torch.ones(3)).tolist() == [size] * 3


def test_the_package_takes_tensors(rank: int, size: int) -> None:
    """Calls of `dl_comm` are those of `dl_comm.torch`: options and gradients."""
    given = values(0, (2 * size, 3), torch.float32)
    block = torch.empty(2, 3)
    assert dl_comm.scatter(None if rank else given, out=block) is block
    assert torch.equal(block, given[2 * rank : 2 * rank + 2])
    assert torch.equal(dl_comm.all_gather(block, counts=[2] * size), given)
    found = dl_comm.gather(x=block, root=0)
    assert found is None if rank else torch.equal(found, given)
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
