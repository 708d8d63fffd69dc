"""Groups of some ranks, meshes, splits on 1, 2, 3 ranks; several groups in use at once."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from c10d_helpers import GLOO, fewer_than, not_gloo, torch_may_refuse
from torch.distributed.device_mesh import init_device_mesh


def total(ranks: list[int]) -> float:
    """What ``reduced`` gives in a group of these ranks."""
    return float(sum(rank + 1 for rank in ranks))


def reduced(group: Any, length: int = 3) -> float:
    """The sum of all members' rank + 1, checked for being the same everywhere."""
    tensor = torch.full((length,), dist.get_rank() + 1.0)
    dist.all_reduce(tensor, group=group)
    assert (tensor == tensor[0]).all()
    return tensor[0].item()


def check(group: Any, ranks: list[int]) -> None:
    """All kinds of calls in a group of these ranks, on a member."""
    me, count = dist.get_rank(group), len(ranks)
    assert ranks[me] == dist.get_rank()
    assert dist.get_world_size(group) == count
    assert dist.get_process_group_ranks(group) == ranks
    assert reduced(group) == total(ranks)
    for root in range(count):
        tensor = torch.tensor([me])
        dist.broadcast(tensor, group_src=root, group=group)
        assert tensor.item() == root
        dist.broadcast(tensor, ranks[root], group=group)
        assert tensor.item() == root
    whole = torch.zeros(count)
    dist.all_gather_into_tensor(whole, torch.tensor([float(me)]), group=group)
    assert whole.tolist() == list(range(count))
    block = torch.zeros(1)
    dist.reduce_scatter_tensor(block, whole, group=group)
    assert block.item() == me * count
    swapped = torch.zeros(count)
    dist.all_to_all_single(swapped, torch.full((count,), float(me)), group=group)
    assert swapped.tolist() == list(range(count))
    found: list[Any] = [None] * count
    dist.all_gather_object(found, me, group=group)
    assert found == list(range(count))
    if count > 1:
        work = dist.isend(torch.tensor([me]), group_dst=(me + 1) % count, group=group)
        received = torch.tensor([-1])
        dist.recv(received, group_src=(me - 1) % count, group=group)
        work.wait()
        assert received.item() == (me - 1) % count
    dist.barrier(group)


def subsets(size: int) -> list[list[int]]:
    """The groups to test: one rank, the first and the last, the last alone, all."""
    return [[0], sorted({0, size - 1}), [size - 1], list(range(size))]


def test_groups_of_some_ranks(rank: int, size: int) -> None:
    for ranks in subsets(size):
        group = dist.new_group(ranks)
        if rank in ranks:
            check(group, ranks)
        else:
            assert group is dist.GroupMember.NON_GROUP_MEMBER
            assert dist.get_rank(group) == -1
    assert reduced(None) == total(list(range(size)))


def test_groups_that_only_members_make(rank: int, size: int) -> None:
    """The other ranks make groups of their own: torch wants as many groups on all members, and calls nobody else."""
    outer = sorted({0, size - 1})
    for ranks in ([rank], outer if rank in outer else [rank], list(range(size)), [rank]):
        check(dist.new_group(ranks, use_local_synchronization=True), ranks)


def test_many_groups(rank: int, size: int) -> None:
    groups = [dist.new_group() for _ in range(30)]
    works = []
    for i, group in enumerate(groups):
        tensor = torch.full((10 + i,), float(i))
        works.append((dist.all_reduce(tensor, group=group, async_op=True), tensor, i))
    for work, tensor, i in works:
        work.wait()
        assert (tensor == i * size).all()
    for group in groups:
        dist.destroy_process_group(group)
    assert reduced(None) == total(list(range(size)))


def test_a_group_is_destroyed(rank: int, size: int) -> None:
    group = dist.new_group()
    assert reduced(group) == total(list(range(size)))
    dist.destroy_process_group(group)
    for _ in range(3):
        group = dist.new_group([0, size - 1] if size > 1 else [0])
        if rank in (0, size - 1):
            reduced(group)
            dist.destroy_process_group(group)
    assert reduced(None) == total(list(range(size)))


def test_a_group_has_a_timeout_and_a_description(rank: int, size: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=45), group_desc="readers")
    assert reduced(group) == total(list(range(size)))
    assert group.group_desc == "readers"
    assert group.group_name


@fewer_than(2)
def test_groups_in_another_order_on_each_rank(rank: int, size: int) -> None:
    """Calls in flight in two groups, started and waited for in another order on each rank."""
    one, two = dist.new_group(), dist.new_group()
    order = [one, two] if rank % 2 == 0 else [two, one]
    for _ in range(20):
        tensors = {group: torch.full((1000,), 1.0 if group is one else 2.0) for group in order}
        works = [dist.all_reduce(tensors[group], group=group, async_op=True) for group in order]
        for work in works:
            work.wait()
        assert (tensors[one] == size).all()
        assert (tensors[two] == 2 * size).all()


@fewer_than(2)
def test_groups_on_two_threads(rank: int, size: int) -> None:
    """Blocking calls in two groups that overlap, on two threads, one thread late on each rank."""
    one, two = dist.new_group(), dist.new_group(sorted({0, size - 1}))
    jobs = {"one": (one, list(range(size))), "two": (two, sorted({0, size - 1}))}
    errors: list[BaseException] = []

    def work(name: str, late: bool) -> None:
        group, ranks = jobs[name]
        try:
            time.sleep(0.3 if late else 0)
            for length in (1, 1000, 200_000):
                for _ in range(10):
                    assert reduced(group, length) == total(ranks)
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    names = [name for name, (_, ranks) in jobs.items() if rank in ranks]
    threads = [threading.Thread(target=work, args=(name, (name == "one") == (rank == 0))) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors
    assert not any(thread.is_alive() for thread in threads)


@fewer_than(3)
def test_a_wait_in_one_group_holds_no_other(rank: int, size: int) -> None:
    """A chain as in pipelines: 0 and 1, then 1 and 2; the calls of the second pair wait for nobody in the first."""
    first, second = dist.new_group([0, 1]), dist.new_group([1, 2])
    tensors = torch.ones(1000), torch.ones(1000)
    works = []
    if rank in (0, 1):
        # Rank 0 comes only after the second pair is done.
        if rank == 0:
            dist.recv(torch.zeros(1), 2)
        works.append(dist.all_reduce(tensors[0], group=first, async_op=True))
    if rank in (1, 2):
        dist.all_reduce(tensors[1], group=second)
        assert (tensors[1] == 2).all()
    if rank == 2:
        dist.send(torch.zeros(1), 0)
    for work in works:
        work.wait()
        assert (tensors[0] == 2).all()


def test_subgroups(rank: int, size: int) -> None:
    mine, groups = dist.new_subgroups(group_size=1)
    assert len(groups) == size
    assert reduced(mine) == rank + 1
    mine, _ = dist.new_subgroups_by_enumeration([list(range(size))])
    assert reduced(mine) == total(list(range(size)))


def test_a_mesh_of_one_dimension(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("data",))
    assert mesh.get_local_rank() == rank
    check(mesh.get_group(), list(range(size)))
    check(mesh["data"].get_group(), list(range(size)))


@pytest.mark.parametrize("wide", [False, True])
def test_a_mesh_of_two_dimensions(rank: int, size: int, wide: bool) -> None:
    mesh = init_device_mesh("cpu", (1, size) if wide else (size, 1), mesh_dim_names=("a", "b"))
    groups = {"a": [rank], "b": list(range(size))} if wide else {"a": list(range(size)), "b": [rank]}
    for name, ranks in groups.items():
        check(mesh.get_group(name), ranks)


def test_split_group(rank: int, size: int) -> None:
    parent = dist.distributed_c10d._get_default_group()
    if not parent._get_backend(torch.device("cpu")).supports_splitting:
        pytest.skip("the backend does not split; torch then makes new groups")
    splits = [[0], list(range(1, size))] if size > 1 else [[0]]
    with torch_may_refuse("No device associated with the default pg", "split_group without a GPU"):
        part = dist.split_group(split_ranks=splits)
    (mine,) = [ranks for ranks in splits if rank in ranks]
    assert reduced(part) == total(mine)
    assert reduced(None) == total(list(range(size)))


def test_a_group_beside_another_backend(rank: int, size: int) -> None:
    """Programs mix backends: ours as default with a group of gloo, and the device form of the name."""
    other = dist.new_group(backend="gloo")
    assert reduced(other) == total(list(range(size)))
    if not GLOO:
        both = dist.new_group(backend="cpu:dl_comm,cuda:dl_comm")
        assert reduced(both) == total(list(range(size)))
        check(dist.new_group(backend="dl_comm"), list(range(size)))


@not_gloo("its own options are taken")
def test_options_of_another_backend_are_refused(rank: int, size: int) -> None:
    with pytest.raises((RuntimeError, TypeError, ValueError), match="Options"):
        dist.new_group(pg_options=dist.ProcessGroupGloo._Options())
    assert reduced(None) == total(list(range(size)))
