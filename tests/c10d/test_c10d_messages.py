"""Point to point, objects and barriers on 1, 2, 3 ranks."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from c10d_helpers import GLOO, MOVED, equal, fewer_than, lacks, not_gloo, torch_may_refuse, values

together = fewer_than(2)


@together
@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_messages_around_the_ring(rank: int, size: int, dtype: torch.dtype) -> None:
    lacks(f"no messages of {dtype}", when=dtype in (torch.int16, torch.uint16, torch.float8_e4m3fn))
    lacks("torch passes complex numbers on, gloo has none", when=dtype.is_complex)
    for shape in ((), (0,), (3, 2), (100_000,)):
        after, before = (rank + 1) % size, (rank - 1) % size
        # All send before they receive.
        work = dist.isend(values(rank, shape, dtype), after)
        found = values(9, shape, dtype)
        assert dist.recv(found, before) == before
        work.wait()
        assert equal(found, values(before, shape, dtype)), shape
        if rank % 2 == 0 and rank + 1 < size:
            dist.send(values(rank, shape, dtype), rank + 1)
        elif rank % 2 == 1:
            received = dist.irecv(found, rank - 1)
            received.wait()
            assert equal(found, values(rank - 1, shape, dtype)), shape


@together
def test_tags_choose_the_message(rank: int, size: int) -> None:
    if rank == 0:
        works = [dist.isend(torch.full((3,), float(tag)), 1, tag=tag) for tag in (1, 2, 3)]
        for work in works:
            work.wait()
    elif rank == 1:
        for tag in (3, 1, 2):
            found = torch.zeros(3)
            dist.recv(found, 0, tag=tag)
            assert found.tolist() == [tag] * 3


@together
def test_messages_of_one_tag_keep_their_order(rank: int, size: int) -> None:
    if rank == 0:
        for work in [dist.isend(torch.tensor([i]), size - 1) for i in range(20)]:
            work.wait()
    elif rank == size - 1:
        tensors = [torch.zeros(1, dtype=torch.int64) for _ in range(20)]
        for work in [dist.irecv(tensor, 0) for tensor in tensors]:
            work.wait()
        assert [int(tensor) for tensor in tensors] == list(range(20))


@together
def test_from_any_source(rank: int, size: int) -> None:
    if rank == 0:
        sources = set()
        for _ in range(size - 1):
            found = torch.zeros(2)
            source = dist.recv(found)
            assert found.tolist() == [source] * 2
            sources.add(source)
        assert sources == set(range(1, size))
    else:
        dist.send(torch.full((2,), float(rank)), 0)
    dist.barrier()


@together
def test_messages_beside_collectives(rank: int, size: int) -> None:
    """A pending receive holds back no collective."""
    found = torch.zeros(3)
    pending = dist.irecv(found, (rank - 1) % size, tag=7)
    for _ in range(5):
        ones = torch.ones(3)
        dist.all_reduce(ones)
        assert ones.tolist() == [size] * 3
    dist.isend(torch.full((3,), float(rank)), (rank + 1) % size, tag=7).wait()
    pending.wait()
    assert found.tolist() == [(rank - 1) % size] * 3


@together
def test_batches(rank: int, size: int) -> None:
    """As pipelines exchange with both neighbours, in both orders."""
    after, before = (rank + 1) % size, (rank - 1) % size
    for length in (1, 50_000):
        for turn in range(2):
            found = [torch.zeros(length), torch.zeros(length)]
            sends = [
                dist.P2POp(dist.isend, torch.full((length,), 1.0 + rank), after, tag=1),
                dist.P2POp(dist.isend, torch.full((length,), -1.0 - rank), before, tag=2),
            ]
            receives = [dist.P2POp(dist.irecv, found[0], before, tag=1), dist.P2POp(dist.irecv, found[1], after, tag=2)]
            operations = sends + receives if turn == rank % 2 else receives + sends
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            assert (found[0] == 1.0 + before).all()
            assert (found[1] == -1.0 - after).all()


@together
def test_the_receiver_comes_later(rank: int, size: int) -> None:
    """A large isend does not wait for its receiver in the caller."""
    length = 2_000_000
    if rank == 0:
        work = dist.isend(torch.full((length,), 5.0), 1)
        dist.all_reduce(torch.ones(1))
        work.wait()
    else:
        dist.all_reduce(torch.ones(1))
    if rank == 1:
        found = torch.zeros(length)
        dist.recv(found, 0)
        assert (found == 5).all()


@together
def test_threads_send_at_once(rank: int, size: int) -> None:
    errors: list[BaseException] = []

    def exchange(tag: int) -> None:
        try:
            for i in range(10):
                work = dist.isend(torch.tensor([rank, tag, i]), (rank + 1) % size, tag=tag)
                found = torch.zeros(3, dtype=torch.int64)
                dist.recv(found, (rank - 1) % size, tag=tag)
                work.wait()
                assert found.tolist() == [(rank - 1) % size, tag, i]
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=exchange, args=(tag,)) for tag in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors


@together
def test_wrong_messages_lose_nothing(rank: int, size: int) -> None:
    with pytest.raises((RuntimeError, ValueError)):
        dist.send(torch.ones(1), rank)
    if not GLOO:  # waits for such a rank
        with pytest.raises((RuntimeError, ValueError)):
            dist.send(torch.ones(1), size)
    work = dist.isend(torch.full((1,), float(rank)), (rank + 1) % size)
    found = torch.zeros(1)
    dist.recv(found, (rank - 1) % size)
    work.wait()
    assert found.item() == (rank - 1) % size


@together
@not_gloo("writes what it gets")
@pytest.mark.parametrize("later", ["receiver", "sender"])
@pytest.mark.parametrize("lengths", [(3, 5), (5, 3), (40_000, 50_000), (50_000, 40_000)], ids=str)
def test_a_message_of_another_length_is_not_written(rank: int, size: int, lengths: tuple[int, int], later: str) -> None:
    sent, expected = lengths
    if rank == (0 if later == "sender" else 1):
        time.sleep(0.05)
    if rank == 0:
        # A message that is dropped has been sent.
        dist.isend(torch.ones(sent), 1).wait()
    elif rank == 1:
        found = torch.full((expected,), 7.0)
        with pytest.raises(RuntimeError, match=rf"{4 * expected} bytes.* {4 * sent}"):
            dist.recv(found, 0)
        assert (found == 7).all()
    dist.barrier()
    if rank == 0:
        dist.send(torch.full((expected,), 2.0), 1)
    elif rank == 1:
        dist.recv(found, 0)
        assert (found == 2).all()


def test_objects(rank: int, size: int) -> None:
    mine = {"rank": rank, "text": "x" * (1 + 100 * rank), "tensor": torch.full((2,), float(rank))}
    found: list[Any] = [None] * size
    dist.all_gather_object(found, mine)
    assert [(item["rank"], len(item["text"])) for item in found] == [(r, 1 + 100 * r) for r in range(size)]
    assert found[-1]["tensor"].tolist() == [size - 1] * 2
    for root in range(size):
        gathered = [None] * size if rank == root else None
        dist.gather_object(rank * 10, gathered, root)
        assert gathered == ([r * 10 for r in range(size)] if rank == root else None)
        items: list[Any] = [root, "text", {"a": root}] if rank == root else [None] * 3
        dist.broadcast_object_list(items, root)
        assert items == [root, "text", {"a": root}]
        part: list[Any] = [None]
        dist.scatter_object_list(part, [f"for {r}" for r in range(size)] if rank == root else None, root)
        assert part == [f"for {rank}"]


@together
def test_objects_point_to_point(rank: int, size: int) -> None:
    if rank == 0:
        dist.send_object_list(["a", {"b": 2}], 1)
    elif rank == 1:
        found: list[Any] = [None, None]
        dist.recv_object_list(found, 0)
        assert found == ["a", {"b": 2}]


def test_barrier_waits_for_the_last(rank: int, size: int) -> None:
    dist.barrier()
    begin = time.monotonic()
    if rank == size - 1:
        time.sleep(0.5)
    dist.barrier()
    assert time.monotonic() - begin > 0.4
    dist.barrier(async_op=True).wait()


def test_monitored_barrier(rank: int, size: int) -> None:
    with torch_may_refuse("only implemented for GLOO", "monitored_barrier of other backends than gloo"):
        dist.monitored_barrier(timeout=timedelta(seconds=30))
    dist.monitored_barrier(timeout=timedelta(seconds=30), wait_all_ranks=True)
