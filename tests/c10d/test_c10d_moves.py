"""broadcast, gather, scatter, all_gather, all_to_all on 1, 2, 3 ranks: every type, lists, splits, layouts, aliases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from c10d_helpers import GLOO, MOVED, SHAPES, equal, everywhere, lacks, not_gloo, values


def skip_types(dtype: torch.dtype, call: str) -> None:
    """Skips types that gloo cannot move."""
    unknown = {torch.int16, torch.uint16, torch.float8_e4m3fn}
    lacks(f"no {call} of {dtype}", when=dtype in unknown)


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_broadcast_from_each_root(rank: int, size: int, dtype: torch.dtype) -> None:
    skip_types(dtype, "broadcast")
    for shape in SHAPES:
        for root in range(size):
            mine = values(rank, shape, dtype)
            dist.broadcast(mine, root)
            assert equal(mine, values(root, shape, dtype)), (shape, root)
            later = values(rank, shape, dtype)
            dist.broadcast(later, root, async_op=True).wait()
            assert equal(later, values(root, shape, dtype)), (shape, root, "async")


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_gather_and_scatter_with_each_root(rank: int, size: int, dtype: torch.dtype) -> None:
    skip_types(dtype, "gather")
    lacks("torch passes complex numbers on, gloo has none", when=dtype.is_complex)
    for shape in SHAPES:
        for root in range(size):
            found = [values(9, shape, dtype) for _ in range(size)]
            dist.gather(values(rank, shape, dtype), found if rank == root else None, root)
            if rank == root:
                assert all(map(equal, found, everywhere(shape, dtype, size))), (shape, root)
            block = values(9, shape, dtype)
            blocks = [values(other + root, shape, dtype) for other in range(size)] if rank == root else None
            dist.scatter(block, blocks, root)
            assert equal(block, values(rank + root, shape, dtype)), (shape, root)


def test_lists_of_other_ranks_may_be_empty(rank: int, size: int) -> None:
    """As in torch.distributed.checkpoint, which passes an empty list where nothing is received."""
    for root in range(size):
        mine = torch.full((3,), float(rank))
        found = [torch.empty(3) for _ in range(size)] if rank == root else []
        dist.gather(mine, found or None, group_dst=root)
        assert [tensor[0].item() for tensor in found] == (list(range(size)) if rank == root else [])
        dist.scatter(mine, [torch.full((3,), float(other)) for other in range(size)] if rank == root else [], root)
        assert mine.tolist() == [rank] * 3


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_all_gather(rank: int, size: int, dtype: torch.dtype) -> None:
    skip_types(dtype, "all_gather")
    for shape in SHAPES:
        mine, all_values = values(rank, shape, dtype), everywhere(shape, dtype, size)
        found = [values(9, shape, dtype) for _ in range(size)]
        dist.all_gather(found, mine)
        assert all(map(equal, found, all_values)), shape
        again = [torch.zeros_like(tensor) for tensor in found]
        dist.all_gather(again, mine, async_op=True).wait()
        assert all(map(equal, again, all_values)), (shape, "async")
        stacked = torch.stack(all_values)
        if not GLOO:  # takes the joined form only
            whole = torch.zeros_like(stacked)
            dist.all_gather_into_tensor(whole, mine)
            assert equal(whole, stacked), (shape, "stacked")
        if shape:
            joined = torch.zeros((size * shape[0], *shape[1:]), dtype=dtype)
            dist.all_gather_into_tensor(joined, mine, async_op=True).wait()
            assert equal(joined.reshape(stacked.shape), stacked), (shape, "joined")


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_all_to_all(rank: int, size: int, dtype: torch.dtype) -> None:
    skip_types(dtype, "all_to_all")
    for rows in (0, 1, 4):
        parts = [values(rank + 10 * other, (rows, 3), dtype) for other in range(size)]
        expected = [values(other + 10 * rank, (rows, 3), dtype) for other in range(size)]
        found = torch.zeros((rows * size, 3), dtype=dtype)
        dist.all_to_all_single(found, torch.cat(parts))
        assert all(map(equal, found.reshape(size, rows, 3), expected)), rows
        found.zero_()
        dist.all_to_all_single(found, torch.cat(parts), async_op=True).wait()
        assert all(map(equal, found.reshape(size, rows, 3), expected)), (rows, "async")
        listed = [torch.zeros_like(part) for part in expected]
        dist.all_to_all(listed, parts)
        assert all(map(equal, listed, expected)), (rows, "lists")


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8, torch.bfloat16], ids=str)
def test_all_to_all_with_split_sizes(rank: int, size: int, dtype: torch.dtype) -> None:
    """Rank r sends (r + other) % 3 rows to another rank: also none."""
    sends, receives = ([(rank + other) % 3 for other in range(size)] for _ in range(2))
    parts = [values(rank + 10 * other, (rows, 2), dtype) for other, rows in enumerate(sends)]
    expected = torch.cat([values(other + 10 * rank, (rows, 2), dtype) for other, rows in enumerate(receives)])
    found = torch.zeros((sum(receives), 2), dtype=dtype)
    dist.all_to_all_single(found, torch.cat(parts), receives, sends)
    assert equal(found, expected)
    lacks("lists of one shape only")
    listed = [torch.zeros((rows, 2), dtype=dtype) for rows in receives]
    dist.all_to_all(listed, parts)
    assert equal(torch.cat(listed), expected)


@pytest.mark.parametrize("length", [0, 1, 3, 50_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_all_to_all_with_split_sizes_of_some_ranks(rank: int, size: int, length: int, dtype: torch.dtype) -> None:
    """Equal splits that one rank gives, and another leaves out, are the same call, in both directions."""
    lacks("no float8", when=dtype == torch.float8_e4m3fn)
    parts = [values(rank + 10 * other, (length,), dtype) for other in range(size)]
    expected = torch.cat([values(other + 10 * rank, (length,), dtype) for other in range(size)])
    for gives in ([0], [size - 1], [*range(1, size)]):
        splits = [length] * size if rank in gives else None
        for given in ((splits, splits), (splits, None), (None, splits)):
            found = torch.zeros(length * size).to(dtype)
            dist.all_to_all_single(found, torch.cat(parts), *given)
            assert equal(found, expected)
            found.zero_()
            works = [dist.all_to_all_single(found, torch.cat(parts), *given, async_op=True)]
            works.append(dist.all_to_all_single(torch.zeros(2 * size), torch.zeros(2 * size), async_op=True))
            for work in works:
                work.wait()
            assert equal(found, expected)


@not_gloo("waits for ever, or ends the process")
def test_splits_of_some_ranks_that_differ(rank: int, size: int) -> None:
    if size == 1:
        pytest.skip("needs another rank")
    found = torch.full((2 * size,), 7.0)
    splits = [2] * size
    if rank == 0:
        splits[0], splits[1] = 1, 3
    with pytest.raises(RuntimeError, match="rank 0 sends 1 elements to rank 0, which expects 2"):
        dist.all_to_all_single(found, torch.zeros(2 * size), None, splits if rank == 0 else None)
    assert (found == 7).all()
    dist.all_to_all_single(found, torch.zeros(2 * size))
    assert (found == 0).all()


def test_only_one_rank_sends(rank: int, size: int) -> None:
    sends = [4] * size if rank == 0 else [0] * size
    receives = [4] + [0] * (size - 1)
    found = torch.zeros(4)
    dist.all_to_all_single(found, torch.arange(4.0 * size if rank == 0 else 0.0), receives, sends)
    assert found.tolist() == [4.0 * rank + i for i in range(4)]


def test_splits_that_do_not_match_the_input(rank: int, size: int) -> None:
    for everyone in (True, False):
        if everyone or rank == 0:
            with pytest.raises((RuntimeError, ValueError)):
                dist.all_to_all_single(torch.zeros(size), torch.zeros(size), [1] * size, [2] * size)
        found = torch.zeros(size)
        dist.all_to_all_single(found, torch.full((size,), float(rank)))
        assert found.tolist() == list(range(size))


@not_gloo("other texts")
def test_errors_name_the_tensor_and_what_it_lacks(rank: int, size: int) -> None:
    x = torch.zeros(size)
    for call, text in [
        (lambda: dist.all_to_all_single(x, x + 0, [1] * size, [2] * size), rf"input has .*\[{size}\].* sum {2 * size}"),
        (
            lambda: dist.all_to_all_single(x, x + 0, [3] * size, [1] * size),
            rf"output has .*split sizes .* sum {3 * size}",
        ),
        (lambda: dist.all_to_all_single(x, x + 0, [1] * (size + 1), [1] * size), f"expected {size} extents"),
        (lambda: dist.all_to_all_single(x, x + 0, [1] * size, [-1] * size), "invalid split sizes"),
        (lambda: dist.all_gather([x] * (size + 1), x + 0), f"{size + 1} tensors for {size} ranks"),
        (lambda: dist.reduce_scatter(x + 0, [torch.zeros(1 + size)] * size), f"rank {rank} must have {size} elements"),
    ]:
        with pytest.raises(ValueError, match=text):
            call()
    if size > 1:
        odd = torch.zeros(size + 1)
        with pytest.raises(ValueError, match=f"multiple of the {size} ranks"):
            dist.all_to_all_single(odd, odd + 0)
    dist.all_reduce(x)
    assert x.tolist() == [0.0] * size


def test_the_input_is_a_slice_of_the_output(rank: int, size: int) -> None:
    """As in FSDP."""
    for length in (5, 100_000):
        whole = torch.zeros(size * length)
        mine = whole[rank * length : (rank + 1) * length]
        mine.copy_(values(rank, (length,), torch.float32))
        dist.all_gather_into_tensor(whole, mine)
        assert equal(whole, torch.cat(everywhere((length,), torch.float32, size)))
        root = size - 1
        rows = torch.zeros(size, length)
        rows[rank] = values(rank, (length,), torch.float32)
        dist.gather(rows[rank], list(rows) if rank == root else None, root)
        assert rank != root or equal(rows, torch.stack(everywhere((length,), torch.float32, size)))
        dist.scatter(rows[rank], list(rows) if rank == root else None, root)
        assert equal(rows[rank], values(rank, (length,), torch.float32))


@not_gloo("takes contiguous tensors only")
def test_dense_tensors_in_another_order(rank: int, size: int) -> None:
    tensor = (torch.arange(6.0).reshape(2, 3) + 10 * rank).t()
    found = [torch.empty(2, 3).t() for _ in range(size)]
    dist.all_gather(found, tensor)
    for other, part in enumerate(found):
        assert torch.equal(part, (torch.arange(6.0).reshape(2, 3) + 10 * other).t())
    dist.broadcast(tensor, 0)
    assert torch.equal(tensor, torch.arange(6.0).reshape(2, 3).t())


def test_large_tensors(rank: int, size: int) -> None:
    length = 2_000_003
    mine = values(rank, (length,), torch.float32)
    whole = torch.empty(size, length)
    dist.all_gather_into_tensor(whole.view(-1), mine)
    assert all(map(equal, whole, everywhere((length,), torch.float32, size)))
    swapped = torch.empty_like(whole)
    dist.all_to_all_single(swapped, torch.stack([values(rank + 10 * o, (length,), torch.float32) for o in range(size)]))
    assert all(equal(part, values(o + 10 * rank, (length,), torch.float32)) for o, part in enumerate(swapped))
    dist.broadcast(mine, size - 1)
    assert equal(mine, values(size - 1, (length,), torch.float32))


def test_several_tensors(rank: int, size: int) -> None:
    inputs = [torch.full((2,), float(rank)), torch.full((3, 1), 10.0 * rank)]
    outputs = [[torch.empty_like(tensor) for tensor in inputs] for _ in range(size)]
    dist.all_gather_coalesced(outputs, inputs)
    assert [[part.flatten()[0].item() for part in parts] for parts in outputs] == [[o, 10.0 * o] for o in range(size)]


@not_gloo("no gather_single")
@pytest.mark.skipif(not hasattr(dist, "gather_single"), reason=f"torch {torch.__version__} lacks gather_single")
def test_the_names_of_later_versions(rank: int, size: int) -> None:
    mine = torch.full((2,), float(rank))
    expected = torch.arange(float(size)).repeat_interleave(2)
    for root in range(size):
        found = torch.empty(2 * size) if rank == root else None
        dist.gather_single(mine, found, root)
        assert found is None or torch.equal(found, expected)
    whole, block = torch.empty(2 * size), torch.empty(2)
    dist.all_gather_single(whole, mine)
    assert torch.equal(whole, expected)
    dist.reduce_scatter_single(block, whole)
    assert block.tolist() == [size * rank] * 2


BAD: dict[str, Any] = {
    "root": lambda size: dist.broadcast(torch.ones(2), size),
    "gaps": lambda size: dist.broadcast(torch.ones(10)[::2], 0),
    "length of an output": lambda size: dist.all_gather_into_tensor(torch.empty(2 * size + 1), torch.ones(2)),
    "type of an output": lambda size: dist.all_gather_into_tensor(torch.empty(2 * size).double(), torch.ones(2)),
    "length of a list": lambda size: dist.all_gather([torch.empty(2)] * (size + 1), torch.ones(2)),
    "type in a list": lambda size: dist.all_gather([torch.empty(2).double()] * size, torch.ones(2)),
    "rows that cannot be split": lambda size: dist.all_to_all_single(
        torch.ones(3 * size + 1), torch.ones(3 * size + 1)
    ),
    "number of splits": lambda size: dist.all_to_all_single(torch.ones(size), torch.ones(size), [1] * (size + 1), []),
    "no list at the root": lambda size: dist.scatter(torch.ones(2), None, dist.get_rank()),
}


@not_gloo("a bad call on one rank breaks the group")
@pytest.mark.parametrize("case", BAD)
def test_wrong_arguments_lose_nothing(rank: int, size: int, case: str) -> None:
    if size == 1 and case == "rows that cannot be split":
        pytest.skip("one rank takes them all")
    for everyone in (True, False):
        if everyone or rank == size - 1:
            with pytest.raises((RuntimeError, ValueError, TypeError)):
                BAD[case](size)
        found = [torch.zeros(2) for _ in range(size)]
        dist.all_gather(found, torch.full((2,), float(rank)))
        assert [part.tolist() for part in found] == [[float(other)] * 2 for other in range(size)]
