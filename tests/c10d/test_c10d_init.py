"""init_process_group and destroy_process_group, again and again and with every kind of store, on 1, 2, 3 ranks."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from c10d_helpers import BACKEND, GLOO

from ranks import free_port

LIMIT = timedelta(seconds=60)


@pytest.fixture
def shared(rank: int, size: int, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A folder, which pytest keeps, and a port. The default group is destroyed, and made again after the test."""
    box: list[Any] = [None]
    if rank == 0:
        box = [{"folder": str(tmp_path), "port": free_port()}]
    dist.broadcast_object_list(box, 0)
    dist.barrier()
    dist.destroy_process_group()
    yield box[0]
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(BACKEND, init_method=f"file://{box[0]['folder']}/again", rank=rank, world_size=size)


def check(rank: int, size: int) -> None:
    """Some calls in the default group, which is then destroyed."""
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    tensor = torch.full((100,), rank + 1.0)
    dist.all_reduce(tensor)
    assert (tensor == size * (size + 1) / 2).all()
    group = dist.new_group([0])
    if rank == 0:
        dist.all_reduce(tensor, group=group)
    found: list[Any] = [None] * size
    dist.all_gather_object(found, rank)
    assert found == list(range(size))
    dist.barrier()
    dist.destroy_process_group()


def test_ten_times_with_one_store(rank: int, size: int, shared: dict[str, Any]) -> None:
    """As torchrun's workers do it: the store lives on, with the keys of earlier groups."""
    store = dist.TCPStore("127.0.0.1", shared["port"], size, rank == 0, LIMIT)
    for turn in range(10):
        dist.init_process_group(
            BACKEND,
            store=dist.PrefixStore(str(turn), store) if GLOO else store,
            rank=rank,
            world_size=size,
            timeout=LIMIT,
        )
        check(rank, size)
    # The rank that has the store's server leaves last.
    store.set(f"end{rank}", "")
    if rank == 0:
        store.wait([f"end{other}" for other in range(size)])


def test_ten_times_with_files(rank: int, size: int, shared: dict[str, Any]) -> None:
    for turn in range(10):
        where = f"file://{shared['folder']}/store{turn}"
        dist.init_process_group(BACKEND, init_method=where, rank=rank, world_size=size, timeout=LIMIT)
        check(rank, size)


def test_a_file_store(rank: int, size: int, shared: dict[str, Any]) -> None:
    store = dist.FileStore(str(Path(shared["folder"]) / "own"), size)
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size, timeout=LIMIT)
    check(rank, size)


def test_an_address(rank: int, size: int, shared: dict[str, Any]) -> None:
    where = f"tcp://127.0.0.1:{shared['port']}"
    dist.init_process_group(BACKEND, init_method=where, rank=rank, world_size=size, timeout=LIMIT)
    check(rank, size)


def test_a_store_of_one_process(rank: int, size: int, shared: dict[str, Any]) -> None:
    """HashStore reaches no other process: a job of one rank, on each rank by itself."""
    if size > 1 and not GLOO:
        pytest.skip("this process is one of several ranks")
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=1, timeout=LIMIT)
    check(0, 1)


@pytest.mark.parametrize("form", ["cpu:{0}", "cpu:{0},cuda:{0}"])
def test_the_name_with_devices(rank: int, size: int, shared: dict[str, Any], form: str) -> None:
    where = f"tcp://127.0.0.1:{shared['port']}"
    dist.init_process_group(form.format(BACKEND), init_method=where, rank=rank, world_size=size, timeout=LIMIT)
    check(rank, size)


def test_groups_are_left_behind(rank: int, size: int, shared: dict[str, Any]) -> None:
    """The default group's end ends the others, also with calls that nobody waited for."""
    for turn in range(3):
        where = f"file://{shared['folder']}/left{turn}"
        dist.init_process_group(BACKEND, init_method=where, rank=rank, world_size=size, timeout=LIMIT)
        groups = [dist.new_group() for _ in range(3)]
        works = [dist.all_reduce(torch.ones(1000), group=group, async_op=True) for group in groups]
        works.pop().wait()
        dist.barrier()
        dist.destroy_process_group()
        del works
