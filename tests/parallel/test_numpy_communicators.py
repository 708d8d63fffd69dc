"""The stack of communicators, grids, the selector, uneven data."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import numpy as np
import pytest

import dl_comm as mc
from dl_comm import training


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    mc.set_communicator(0)
    mc.collective_selector.reset()
    while mc.communicator_names()[1:]:
        mc.pop_communicator()


def ranks_of(group: mc.Group | None) -> tuple[int, ...]:
    assert group is not None
    return group.ranks


def test_levels_split_the_level_below(rank: int, size: int) -> None:
    level = mc.push_communicator("even" if rank % 2 == 0 else "odd", cartesian=False)
    assert level == 1
    assert mc.push_communicator(rank) == 2
    first, second = mc.communicator(1), mc.communicator(2)
    assert first.local.ranks == tuple(range(rank % 2, size, 2))
    assert first.num_groups == min(size, 2)
    assert not first.cartesian
    assert (first.cross is not None) == (rank < 2)
    if rank < 2:
        assert ranks_of(first.cross) == tuple(range(min(size, 2)))
    assert second.local.ranks == (rank,)
    assert second.cartesian
    assert ranks_of(second.cross) == first.local.ranks
    assert len(mc.communicator_names()) == 3
    assert "tree" in mc.communicator_names()[1]
    with mc.set_communicator(1):
        assert mc.allreduce(rank) == sum(first.local.ranks)
        assert mc.all_gather(np.array([rank])).tolist() == list(first.local.ranks)
        x = np.array([rank])
        assert mc.broadcast([x], 0)[0] is x
        assert x[0] == first.local.ranks[0]
        mc.barrier()
        with pytest.raises(mc.StateError, match="group="):
            mc.join()
        with pytest.raises(mc.ArgumentError, match="in use"):
            mc.pop_communicator(), mc.pop_communicator()
        mc.push_communicator(rank)
    assert mc.allreduce(rank) == size * (size - 1) // 2
    for wrong in (5, -1, "1"):
        with pytest.raises(mc.ArgumentError, match="level"):
            mc.communicator(wrong)  # type: ignore[arg-type]
    with pytest.raises(mc.ArgumentError, match="before it begins"):
        mc.collective_span(2, 1)


@pytest.mark.parametrize("cartesian", [None, False])
@pytest.mark.parametrize("key", ["own", "same", "halves"])
def test_an_allreduce_goes_through_a_span(rank: int, size: int, cartesian: bool | None, key: str) -> None:
    keys = {"own": rank, "same": 0, "halves": int(rank > 0)}
    mc.push_communicator(keys[key], cartesian=cartesian)
    mc.push_communicator(rank % 2, cartesian=cartesian)
    ones = np.arange(10, dtype=np.float64)
    for begin, end in ((0, 1), (0, 2), (1, 2)):
        with mc.collective_span(begin, end):
            members = mc.communicator().local.ranks
            total = sum(member + 1 for member in members)
            assert np.array_equal(mc.allreduce((rank + 1) * ones), total * ones)
            assert np.allclose(mc.allreduce((rank + 1) * ones, "mean"), total / len(members) * ones)
            assert mc.allreduce(rank, "max") == max(members)
            assert mc.allreduce(np.full(3, 3e4, np.float16), "mean").tolist() == [3e4] * 3, "the sum is too large"
            assert np.allclose(mc.allreduce(ones, prescale=2.0, postscale=0.5), len(members) * ones)
            result = [np.full(3, rank), np.full(2, rank + 0.5)]
            mc.allreduce(result, out=result)
            assert result[0].tolist() == [sum(members)] * 3
            assert mc.all_gather(np.array([rank])).tolist() == list(members), "of the first level of the span"
            work = mc.allreduce(ones, async_op=True)
            assert np.array_equal(work.wait(), len(members) * ones)
            with pytest.raises(mc.ArgumentError, match="flat"):
                mc.allreduce(3, "mean")
            mc.collective_selector.set("allreduce", "flat")
            assert mc.allreduce(3, "mean") == 3
            mc.collective_selector.reset()
    assert mc.communicator().level == 0


def test_unequal_local_groups_are_a_tree(rank: int, size: int) -> None:
    if size == 3:
        with pytest.raises(mc.ArgumentError, match=r"sizes are \[1, 2\]"):
            mc.push_communicator(rank > 0, cartesian=True)
    mc.push_communicator(rank > 0)
    assert mc.communicator(1).cartesian == (size < 3)


def test_a_grid_has_a_group_for_each_axis(rank: int, size: int) -> None:
    with mc.grid(data=size, model=1) as grid:
        assert grid.data.ranks == tuple(range(size))
        assert grid.model.ranks == (rank,)
        assert grid.coordinates == {"data": rank, "model": 0}
        assert grid.shape == {"data": size, "model": 1}
        assert mc.allreduce(1, group=grid.data) == size
    with mc.grid(data=1, model=-1) as grid:
        assert grid.model.ranks == tuple(range(size))
        assert grid.data.ranks == (rank,)
        assert "model" in repr(grid)
        with pytest.raises(AttributeError, match="data, model"):
            _ = grid.rows
    for axes in ({"data": size + 1}, {"data": -1, "model": -1}, {"data": 0}, {"free": size}, {}):
        with pytest.raises(mc.ArgumentError):
            mc.grid(**axes)


def test_the_selector_changes_the_group_of_a_call(rank: int, size: int) -> None:
    selector = mc.collective_selector
    assert selector.cpu.singlenode.sync.allreduce == "auto"
    selector.cpu.multinode.sync.allreduce = "ring"
    assert selector.get("allreduce", hosts="multinode") == "ring"
    assert selector.get("allreduce") == "auto"
    assert "ring" in str(selector)
    assert "cpu.multinode.sync" in str(selector)
    assert mc.allreduce(rank) == size * (size - 1) // 2
    selector.set("allreduce", "staged", device="gpu")
    assert selector.gpu.singlenode.async_.allreduce == "staged"
    selector.set("allreduce", "hierarchical", hosts="singlenode")
    with pytest.raises(mc.ArgumentError, match="collective_span"):
        mc.allreduce(rank)
    with pytest.raises(mc.ArgumentError, match="fastest"):
        selector.set("allreduce", "fastest")
    with pytest.raises(mc.ArgumentError, match="ring"):
        selector.set("all_gather", "ring")
    with pytest.raises(AttributeError, match="singlenode"):
        _ = selector.cpu.allreduce
    with pytest.raises(AttributeError, match="give device"):
        selector.cpu.allreduce = "flat"


def test_groups_have_settings_of_their_own(rank: int, size: int) -> None:
    with mc.Group(name="set", threads=3, algorithm="pairwise", gpu_path="staged", timeout=50) as group:
        x = np.full(1 << 20, rank + 1.0, np.float32)
        assert (mc.allreduce(x, group=group) == size * (size + 1) / 2).all()
    with pytest.raises(mc.ArgumentError, match="fastest"):
        mc.Group(name="set", algorithm="fastest" if rank == 0 else None)
    with pytest.raises(mc.ArgumentError, match="threads"):
        mc.Group(name="set", threads=0)
    assert mc.allreduce(1) == size


def test_availability_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    text = mc.collective_availability()
    assert text in capsys.readouterr().out
    rows = {line.split()[0]: line for line in text.splitlines()}
    assert set(rows) > {"allreduce", "all_to_all", "barrier"}
    assert "ring" in rows["allreduce"]
    assert rows["all_to_all"].split()[1:3] == ["auto", "flat"]
    assert "gpu" not in mc.collective_availability(gpu=False)


def test_shards_cover_the_data_once(rank: int, size: int) -> None:
    for n, nranks in itertools.product((0, 1, 5, 10), (1, 2, 3, 7)):
        parts = [training.shard(n, part, nranks) for part in range(nranks)]
        assert [index for part in parts for index in part] == list(range(n))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    data = np.arange(11.0)
    part = training.shard(len(data))
    predictions = data[part.start : part.stop] * 2
    assert mc.all_gather(predictions, ragged=True).tolist() == (data * 2).tolist()
    loss = float(predictions.mean()) if len(part) else float("nan")
    assert mc.average_metrics({"loss": loss}, weight=len(part))["loss"] == pytest.approx((data * 2).mean())
    for wrong in ((-1, 0, 1), (1, 2, 2), (1, -1, 2), (1, 0, 0)):
        with pytest.raises(mc.ArgumentError):
            training.shard(*wrong)


@pytest.mark.parametrize("grows", [True, False])
def test_ranks_join_when_their_data_ends(rank: int, size: int, grows: bool) -> None:
    steps = [2 * (other if grows else size - 1 - other) for other in range(size)]
    for team in (0, 1):
        for step in range(steps[rank]):
            gradient = np.full(1000, rank + 1.0, np.float32)
            (mean,) = mc.gradients([gradient], team)
            total = sum(other + 1 for other in range(size) if steps[other] > step)
            assert np.allclose(mean, total / size)
            if team == 0:
                assert mc.allreduce(rank + 1) == total
        assert mc.join() == (size - 1 if grows else 0)
    assert mc.allreduce(1) == size
    with mc.Group() as group:
        # No call has run: rank 0 is the last in time.
        time.sleep(0.05 * (size - 1 - rank))
        assert mc.join(group=group) == 0


def test_other_calls_of_a_joined_rank_are_errors(rank: int, size: int) -> None:
    if rank > 0:
        with pytest.raises(mc.MismatchError, match="has joined"):
            mc.all_gather(np.ones(3))
    # After the failed call, rank 1 is the last.
    time.sleep(0.05 * (rank == 1))
    assert mc.join() == min(1, size - 1)
    with pytest.raises(mc.ArgumentError):
        mc.join(timeout=-1)
