"""Groups as the centre: methods, the world, and `group=` wherever ranks average, broadcast or write."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import numpy as np
import pytest

import dl_comm as mc
from dl_comm._api import methods
from dl_comm._arrays import groups
from dl_comm._base.table import CALLS


def pairs(rank: int, size: int) -> mc.Group:
    """Ranks 0 and 1, 2 and 3, and so on; the last may be alone."""
    group = mc.split(rank // 2)
    assert group is not None
    return group


def mean_of(group: mc.Group) -> float:
    """The mean of the ranks' numbers in the job."""
    return sum(group.ranks) / group.size


def test_the_world_has_the_ranks_and_hosts_of_the_job(rank: int, size: int) -> None:
    world = mc.world()
    assert world is mc.world()
    assert (world.rank, world.size, world.ranks) == (rank, size, tuple(range(size)))
    assert (world.local_rank, world.local_size, world.hosts) == (mc.local_rank(), mc.local_size(), mc.num_hosts())
    with pairs(rank, size) as group:
        assert (group.local_rank, group.local_size, group.hosts) == (group.rank, group.size, 1)


def test_every_method_does_what_the_function_does_on_the_group(rank: int, size: int) -> None:
    for group in (mc.world(), pairs(rank, size)):
        members, x = list(group.ranks), np.array([rank + 1.0])
        ones = np.arange(float(group.size)) + rank
        assert group.allreduce(x) == sum(members) + len(members)
        assert group.allreduce(x, "max", name="largest") == max(members) + 1
        assert (group.all_gather(x) == np.array(members) + 1).all()
        reduced, gathered = group.reduce(x, group.size - 1), group.gather(x, 0)
        assert (reduced is None) == (group.rank != group.size - 1)
        assert (gathered is None) == (group.rank != 0)
        block = np.zeros(1)
        group.scatter(ones if group.rank == 0 else None, 0, out=block)
        assert block == members[0] + group.rank
        assert group.reduce_scatter(ones) == group.size * group.rank + sum(members)
        assert (group.all_to_all(ones) == np.array(members) + group.rank).all()
        assert group.broadcast([x.copy()], group.size - 1)[0] == members[-1] + 1
        assert group.gradients([x])[0] == mean_of(group) + 1
        assert group.average(rank) == mean_of(group)
        assert group.average_metrics({"loss": rank}, weight=2) == {"loss": mean_of(group)}
        assert group.all_gather_object(str(rank)) == [str(member) for member in members]
        assert group.broadcast_object(str(rank), root=group.size - 1) == str(members[-1])
        assert group.gather_object(rank) == (members if group.rank == 0 else None)
        received = np.zeros(1)
        status = group.sendrecv(x, (group.rank + 1) % group.size, received, (group.rank - 1) % group.size)
        assert (status.source, received[0]) == ((group.rank - 1) % group.size, members[group.rank - 1] + 1)
        group.barrier(timeout=50)
        halves = group.split(group.rank % 2)
        assert halves is not None
        assert halves.ranks == tuple(members[group.rank % 2 :: 2])
        assert group.grid(data=-1).data.ranks == tuple(members)
        with pytest.raises(TypeError, match="group"):
            group.allreduce(x, group=group)  # type: ignore[call-arg]


def test_the_methods_of_the_world_meet_the_functions(rank: int, size: int) -> None:
    """Ranks may use either spelling."""
    world = mc.world()
    ranks, x = (mc, world)[rank % 2], np.array([rank + 1.0])
    total = size * (size + 1) / 2
    assert ranks.allreduce(x) == total
    assert ranks.broadcast([x.copy()], 0)[0] == 1
    assert ranks.gradients([x])[0] == total / size
    assert ranks.average(x.copy()) == total / size
    assert ranks.average_metrics({"x": rank + 1}) == {"x": total / size}
    assert ranks.all_gather_object(rank) == list(range(size))
    assert ranks.broadcast_object(rank, 0) == 0
    ranks.barrier()
    if rank % 2:
        assert world.join() >= 0
    else:
        assert mc.join() >= 0


def test_the_world_is_all_ranks_beside_communicators(
    rank: int, size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What ignores the communicators meets its other spelling, and the world's methods stay those of all ranks."""
    world, x, total = mc.world(), np.array([rank + 1.0]), size * (size + 1) / 2
    folder = Path(mc.broadcast_object(str(tmp_path_factory.mktemp("world")), 0))
    mc.push_communicator(rank)
    try:
        mc.set_communicator(1)
        assert mc.allreduce(x) == rank + 1
        ranks = (mc, world)[rank % 2]
        assert ranks.gradients([x])[0] == total / size
        assert ranks.average_metrics({"x": rank + 1}) == {"x": total / size}
        assert ranks.average(rank + 1) == total / size
        ranks.write_on_rank0(folder / "file", lambda path: path.write_text("fine"))
        assert ranks.read_on_rank0(folder / "file") == b"fine"
        assert world.allreduce(x) == total
        assert world.broadcast([x.copy()], size - 1)[0] == size
        assert world.broadcast([np.array([rank], np.uint32)], size - 1)[0] == size - 1
        world.barrier()
    finally:
        mc.set_communicator(0)
        mc.pop_communicator()


def test_declarations_are_those_of_the_functions() -> None:
    """What type checkers and the documentation read."""
    tree = ast.parse(Path(inspect.getfile(groups)).read_text())
    group = next(each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == "Group")
    block = next(each for each in group.body if isinstance(each, ast.If))
    types = {
        ast.unparse(each.target): ast.unparse(each.annotation) for each in block.body if isinstance(each, ast.AnnAssign)
    }
    assert types == {call.name: call.__name__ for call in CALLS}
    declared = {each.name: each for each in block.body if isinstance(each, ast.FunctionDef)}
    assert {*types, *declared} == {function.__name__ for function in methods.FUNCTIONS}
    for name, definition in declared.items():
        signature = inspect.signature(getattr(mc.Group, name))
        written = f"({ast.unparse(definition.args)}) -> {ast.unparse(definition.returns)}"  # type: ignore[arg-type]
        parameters = [
            each.replace(kind=each.POSITIONAL_OR_KEYWORD) if each.name == "self" else each
            for each in signature.parameters.values()
        ]
        expected = str(signature.replace(parameters=parameters)).replace("'", "").replace(" ", "")
        assert written.replace("'", "").replace(" ", "") == expected, name


def test_only_members_take_part(rank: int, size: int) -> None:
    if rank == size - 1:
        with mc.Group([rank], "alone") as group:
            assert group.gradients([np.array([float(rank)])])[0] == rank
            assert group.average_metrics({"a": 1.5, "b": rank}) == {"a": 1.5, "b": rank}


def test_a_file_of_each_group(rank: int, size: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pairs(rank, size) as group:
        folder = Path(mc.broadcast_object(str(tmp_path_factory.mktemp("files")), 0))
        path = folder / f"part{rank // 2}"
        group.write_on_rank0(path, lambda place: place.write_text(str(rank)))
        assert group.read_on_rank0(path) == str(group.ranks[0]).encode()
        if group.size > 1:
            with pytest.raises(ZeroDivisionError if group.rank == 0 else mc.CommError, match="division"):
                group.write_on_rank0(path, lambda place: 1 / 0)
        assert path.read_text() == str(group.ranks[0])


def test_errors(rank: int, size: int) -> None:
    x = np.zeros(1)
    with pairs(rank, size) as group:
        with pytest.raises(mc.ArgumentError, match="group or team"):
            mc.gradients([x], 1, group=group)
        with pytest.raises(mc.ArgumentError, match=r"invalid group: 'all'"):
            mc.gradients([x], group="all")  # type: ignore[arg-type]
        if group.size == 2:
            with pytest.raises(mc.MismatchError, match="split"):
                group.gradients([np.zeros(1 + group.rank)])
        assert group.gradients([x])[0] == 0
        if group.size == 2:
            with pytest.raises(mc.DTypeError if group.rank == 0 else mc.MismatchError, match="not a number"):
                group.average_metrics({"a": "text" if group.rank == 0 else 1.0})
    with pytest.raises(mc.ArgumentError, match="freed"):
        group.gradients([x])
