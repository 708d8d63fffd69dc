"""all_reduce, reduce, reduce_scatter on 1, 2, 3 ranks: every type, every ReduceOp, layouts, aliases, bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from c10d_helpers import (
    FLOATS,
    GLOO,
    OPERATORS,
    REDUCED,
    SHAPES,
    close,
    equal,
    everywhere,
    folded,
    gloo_reduces,
    lacks,
    not_gloo,
    operators,
    premultiplied,
    values,
)


def cases(dtype: torch.dtype) -> list[str]:
    """The operators to test for a type."""
    names = [name for name in operators(dtype) if not GLOO or gloo_reduces(name, dtype)]
    if not names:
        lacks(f"no reduction of {dtype}")
    return names


@pytest.mark.parametrize("dtype", REDUCED, ids=str)
def test_all_reduce(rank: int, size: int, dtype: torch.dtype) -> None:
    for name in cases(dtype):
        op = OPERATORS[name][0]
        for shape in SHAPES:
            expected = folded(name, everywhere(shape, dtype, size))
            mine = values(rank, shape, dtype)
            assert dist.all_reduce(mine, op) is None
            assert close(mine, expected), (name, shape)
            later = values(rank, shape, dtype)
            work = dist.all_reduce(later, op, async_op=True)
            work.wait()
            assert close(later, expected), (name, shape, "async")


@pytest.mark.parametrize("dtype", REDUCED, ids=str)
def test_reduce_to_each_root(rank: int, size: int, dtype: torch.dtype) -> None:
    for name in cases(dtype):
        expected = folded(name, everywhere((7, 2), dtype, size))
        for root in range(size):
            mine = values(rank, (7, 2), dtype)
            dist.reduce(mine, root, OPERATORS[name][0])
            if rank == root:
                assert close(mine, expected), (name, root)


@pytest.mark.parametrize("dtype", REDUCED, ids=str)
def test_reduce_scatter(rank: int, size: int, dtype: torch.dtype) -> None:
    for name in cases(dtype):
        op = OPERATORS[name][0]
        for rows in (0, 1, 4):
            whole = folded(name, everywhere((rows * size, 3), dtype, size))
            expected = whole[rows * rank : rows * (rank + 1)]
            mine = values(rank, (rows * size, 3), dtype)
            block = torch.empty_like(expected)
            dist.reduce_scatter_tensor(block, mine, op)
            assert close(block, expected), (name, rows)
            assert equal(mine, values(rank, (rows * size, 3), dtype)), "the input stays as it is"
            stacked = torch.zeros_like(expected)
            form = mine if GLOO else mine.reshape(size, rows, 3)  # gloo takes the joined form only
            dist.reduce_scatter_tensor(stacked, form, op, async_op=True).wait()
            assert close(stacked, expected), (name, rows, "stacked")
            listed = torch.zeros_like(expected)
            dist.reduce_scatter(listed, list(mine.chunk(size)) if rows else [mine] * size, op)
            assert close(listed, expected), (name, rows, "list")


@not_gloo("no PREMUL_SUM")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sums_with_a_factor(rank: int, size: int, dtype: torch.dtype) -> None:
    for factor in (0.5, torch.tensor([0.25], dtype=dtype)):
        op = premultiplied(factor)
        expected = (folded("sum", everywhere((8,), dtype, size)).double() * float(factor)).to(dtype)
        mine = values(rank, (8,), dtype)
        dist.all_reduce(mine, op)
        assert close(mine, expected)
        whole = values(rank, (8 * size,), dtype)
        block = torch.empty(8, dtype=dtype)
        dist.reduce_scatter_tensor(block, whole, op)
        total = folded("sum", everywhere((8 * size,), dtype, size)).double() * float(factor)
        assert close(block, total[8 * rank : 8 * rank + 8].to(dtype))


def test_large_tensors(rank: int, size: int) -> None:
    length = 3_000_001
    mine = values(rank, (length,), torch.float32)
    dist.all_reduce(mine)
    assert equal(mine, folded("sum", everywhere((length,), torch.float32, size)))
    whole = values(rank, (size * 500_000,), torch.float32)
    block = torch.empty(500_000)
    dist.reduce_scatter_tensor(block, whole)
    total = folded("sum", everywhere((size * 500_000,), torch.float32, size))
    assert equal(block, total[rank * 500_000 : (rank + 1) * 500_000])


@not_gloo("rounds a half-precision sum after each step")
@pytest.mark.parametrize(("dtype", "step"), [(torch.float16, 2048.0), (torch.bfloat16, 256.0)], ids=str)
def test_half_precision_sums_are_rounded_once(rank: int, size: int, dtype: torch.dtype, step: float) -> None:
    """1 is half of the step between numbers: added one after the other, all would be lost."""
    mine = torch.full((1000,), step if rank == 0 else 1.0, dtype=dtype)
    dist.all_reduce(mine)
    assert mine.tolist() == [torch.tensor(step + size - 1).to(dtype).item()] * 1000


@not_gloo("takes contiguous tensors only")
def test_dense_tensors_in_another_order(rank: int, size: int) -> None:
    for tensor in (
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    ):
        mine = (tensor + rank).clone(memory_format=torch.preserve_format)
        strides = mine.stride()
        dist.all_reduce(mine)
        assert mine.stride() == strides
        assert torch.equal(mine, size * tensor + size * (size - 1) / 2)
        sent = (tensor + rank).clone(memory_format=torch.preserve_format)
        dist.broadcast(sent, size - 1)
        assert torch.equal(sent, tensor + size - 1)


def test_aliases(rank: int, size: int) -> None:
    """The output is a slice of the input, as in FSDP."""
    whole = values(rank, (size, 5), torch.float32)
    dist.reduce_scatter_tensor(whole[rank], whole.view(-1))
    total = folded("sum", everywhere((size, 5), torch.float32, size))
    assert equal(whole[rank], total[rank])


def test_a_slice_of_a_larger_tensor(rank: int, size: int) -> None:
    around = torch.full((10,), -1.0)
    around[3:6] = rank
    dist.all_reduce(around[3:6])
    assert around.tolist() == [-1.0] * 3 + [size * (size - 1) / 2] * 3 + [-1.0] * 4


def test_a_parameter_is_reduced_in_place(rank: int, size: int) -> None:
    weight = torch.nn.Parameter(torch.full((3,), float(rank)))
    version = weight._version
    with torch.no_grad():
        dist.all_reduce(weight.data if GLOO else weight)
    assert weight.tolist() == [size * (size - 1) / 2] * 3
    assert GLOO or weight._version >= version


def test_sparse_tensors(rank: int, size: int) -> None:
    """As the gradients of sparse embeddings; each rank has other rows."""
    rows = torch.tensor([[rank, 4]])
    mine = torch.sparse_coo_tensor(rows, torch.full((2, 3), rank + 1.0), (5, 3))
    dense = sum(
        torch.sparse_coo_tensor(torch.tensor([[r, 4]]), torch.full((2, 3), r + 1.0), (5, 3)).to_dense()
        for r in range(size)
    )
    work = dist.all_reduce(mine, async_op=True)
    work.wait()
    assert torch.equal(work.result()[0].to_dense(), dense)


BAD: dict[str, Any] = {
    "bits of floats": lambda size: dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND),
    "bits of floats, reduced": lambda size: dist.reduce(torch.ones(3), 0, dist.ReduceOp.BXOR),
    "gaps": lambda size: dist.all_reduce(torch.ones(10)[::2]),
    "overlapping elements": lambda size: dist.all_reduce(torch.ones(1).expand(4)),
    "root": lambda size: dist.reduce(torch.ones(3), size),
    "length of an input": lambda size: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(2 * size + 1)),
    "type of an input": lambda size: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(2 * size).double()),
    "length of a list": lambda size: dist.reduce_scatter(torch.ones(2), [torch.ones(2)] * (size + 1)),
    "type in a list": lambda size: dist.reduce_scatter(torch.ones(2), [torch.ones(2).double()] * size),
}


@not_gloo("a bad call on one rank breaks the group")
@pytest.mark.parametrize("case", BAD)
def test_wrong_arguments_lose_nothing(rank: int, size: int, case: str) -> None:
    for everyone in (True, False):
        if everyone or rank == size - 1:
            with pytest.raises((RuntimeError, ValueError, TypeError)):
                BAD[case](size)
        ones = torch.ones(3)
        dist.all_reduce(ones)
        assert ones.tolist() == [size] * 3
