"""The parameter server of every framework with writable tensors: rules, values, orders, errors, on 1, 2 and 3 ranks."""

from __future__ import annotations

import random
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dl_comm as mc
from frameworks import ALL, COMPLEX, Framework, dtype_of

pytestmark = pytest.mark.needs("out")


def server(framework: Framework, arrays: Any, **options: Any) -> mc.ParameterServer:
    make = framework.make
    return mc.ParameterServer([make(each) for each in arrays] if isinstance(arrays, list) else make(arrays), **options)


def values(x: Any) -> np.ndarray[Any, Any]:
    """As float64, whatever the framework."""
    if isinstance(x, np.ndarray):
        return x.astype(np.float64)
    return np.asarray(x.double().numpy())


@pytest.mark.parametrize("dtype", [name for name in ALL if name != "bool" and name not in COMPLEX])
def test_updates_of_all_ranks_are_added(framework: Framework, dtype: str, rank: int, size: int) -> None:
    start = np.arange(10).astype(dtype_of(dtype))
    with server(framework, start) as ps:
        for turn in range(3):
            ps.send(framework.make(np.full(10, turn + rank % 2).astype(dtype_of(dtype))))
        mc.barrier()
        got = ps.receive()
        assert got.dtype == framework.make(start).dtype
        assert (values(got) == np.arange(10) + 3 * size + 3 * (size // 2)).all()


def test_a_shard_begins_with_the_values_of_its_owner(framework: Framework, rank: int, size: int) -> None:
    with server(framework, [np.full(7, 1.0 + rank), np.full((2, 4), 10.0 + rank, np.float32)]) as ps:
        assert (ps.rank, ps.size) == (rank, size)
        first, second = map(values, ps.receive())
        assert second.shape == (2, 4)
        for owner in range(size):
            assert (first[ps.shard(0, owner)] == 1 + owner).all()
            assert (second.reshape(-1)[ps.shard(1, owner)] == 10 + owner).all()
        assert ps.shard(1).stop - ps.shard(1).start in (8 // size, 8 // size + 1)
        mc.barrier()


def test_copy_zero_and_factors(framework: Framework, rank: int, size: int) -> None:
    make = framework.make
    with server(framework, [np.zeros(9, np.float32), np.zeros(6, np.float32)]) as ps:
        if rank == size - 1:
            ps.send([make(np.full(9, 8, np.float32)), make(np.full(6, 4, np.float32))], "copy")
            ps.send(make(np.full(6, 2, np.float32)), scale=-0.5, tensor=1)
        mc.barrier()
        assert (values(ps.receive(tensor=0)) == 8).all()
        assert (values(ps.receive(tensor=1)) == 3).all()
        mc.barrier()
        if rank == 0:
            ps.send(rule="zero", tensor=1)
        mc.barrier()
        out = [make(np.ones(9, np.float32)), make(np.ones(6, np.float32))]
        assert ps.receive(out) is out
        assert (values(out[0]) == 8).all()
        assert (values(out[1]) == 0).all()
        mc.barrier()


def test_started_operations_take_effect_in_order(framework: Framework, rank: int, size: int) -> None:
    length = 300_000
    with server(framework, np.zeros(length, np.float32)) as ps:
        mc.barrier()
        if rank == 0:
            works, updates = [], []
            for turn in range(20):
                updates.append(framework.make(np.full(length, turn, np.float32)))
                works.append(ps.send(updates[-1], "copy", async_op=True))
            received = ps.receive(async_op=True)
            ps.send(framework.make(np.ones(length, np.float32)))  # waits behind them
            assert (values(received.wait()) == 19).all()
            assert all(work.test() for work in works)
            assert (values(ps.receive()) == 20).all()
        mc.barrier()


def test_prefetch_and_integrate(framework: Framework, rank: int, size: int) -> None:
    mine = framework.make(np.full(50, float(rank)))
    ps = mc.ParameterServer(mine)
    mc.barrier()
    ps.prefetch().wait()
    fetched = values(ps.receive())

    def average(server_side: Any, own: Any) -> None:
        own += server_side

    ps.integrate(average)  # the one above
    assert (values(mine) == fetched + rank).all()
    ps.integrate(average)  # makes one
    assert (values(mine) == 2 * fetched + rank).all()
    ps.close()
    ps.close()
    with pytest.raises(mc.StateError, match="was closed"):
        ps.send(mine)
    with pytest.raises(mc.StateError, match="was closed"):
        ps.receive()


def test_small_updates_of_half_types_are_kept(framework: Framework, rank: int, size: int) -> None:
    for dtype in (np.float16, ml_dtypes.bfloat16):
        with server(framework, np.ones(4).astype(dtype)) as ps:
            tiny = framework.make(np.full(4, 2.0**-12).astype(dtype))  # lost if it were added to a half
            for _ in range(2**8):
                ps.send(tiny)
            mc.barrier()
            assert (values(ps.receive()) == 1 + size / 16).all()
            mc.barrier()


def test_rules_in_python(framework: Framework, rank: int, size: int) -> None:
    def largest(shard: Any, update: Any) -> None:
        assert shard.shape == update.shape
        larger = update > shard
        shard[larger] = update[larger]

    def refuse(shard: Any, update: Any) -> None:
        raise RuntimeError("not today")

    with server(framework, [np.zeros(40_000, np.float32)], rules={"max": largest, "refuse": refuse}) as ps:
        ps.send([framework.make(np.arange(40_000, dtype=np.float32) * (rank + 1))], "max")
        mc.barrier()
        assert (values(ps.receive()[0]) == np.arange(40_000) * size).all()
        mc.barrier()
        with pytest.raises(mc.ArgumentError, match=r"rule 'refuse' failed on rank 0: RuntimeError: not today"):
            ps.send([framework.make(np.ones(40_000, np.float32))], "refuse")
        ps.send([framework.make(np.ones(40_000, np.float32))])  # goes on
        mc.barrier()


def test_bad_input_changes_nothing(framework: Framework, rank: int, size: int) -> None:
    make = framework.make
    with server(framework, [np.ones(8, np.float32), np.ones(8, bool)]) as ps:
        one, flags = make(np.ones(8, np.float32)), make(np.ones(8, bool))
        with pytest.raises(mc.ArgumentError, match=r"updates: tensor 0 has the shape \(9,\)"):
            ps.send([make(np.ones(9, np.float32)), flags])
        with pytest.raises(mc.ArgumentError, match="updates has 1 tensors; the server has 2"):
            ps.send([one])
        with pytest.raises(mc.DTypeError, match="tensor 0 of the parameter server has elements of float32"):
            ps.receive([make(np.ones(8)), flags])
        with pytest.raises(mc.DTypeError, match="bool has no sum"):
            ps.send([one, flags])
        with pytest.raises(mc.ArgumentError, match="invalid rule: 'mean'"):
            ps.send([one, flags], "mean")
        with pytest.raises(mc.ArgumentError, match="scale is a factor"):
            ps.send([one, flags], "copy", scale=2.0)
        with pytest.raises(mc.ArgumentError, match="invalid tensor: 2"):
            ps.receive(tensor=2)
        with pytest.raises(mc.ArgumentError, match="takes none"):
            ps.send([one, flags], "zero")
        mc.barrier()
        assert all((values(each) == 1).all() for each in ps.receive())
        mc.barrier()


def test_too_small_and_different_tensors_are_refused_everywhere(framework: Framework, rank: int, size: int) -> None:
    with pytest.raises(mc.ArgumentError, match="at least one tensor"):
        mc.ParameterServer([], timeout=20)
    if size > 1:
        with pytest.raises(mc.ArgumentError, match="it needs one for each of the"):
            server(framework, np.ones(size - 1), timeout=20)
    if size == 2:  # of three different ones, two may learn of it before the third
        with pytest.raises(mc.MismatchError, match="parameter server of float64"):
            server(framework, np.ones(9 + rank), timeout=20)
    with server(framework, np.ones(size)) as ps:  # and all goes on
        assert (values(ps.receive()) == 1).all()


def test_a_rank_that_differs_is_an_error_on_all(framework: Framework, rank: int, size: int) -> None:
    def rule(shard: Any, update: Any) -> None:
        shard += update

    if size > 1:
        with pytest.raises(mc.MismatchError, match=r"rules: the ranks have different names: \['a', 'b'\], \[\]"):
            server(framework, np.ones(9), rules={"b": rule, "a": rule} if rank == 0 else None)
        wrong: type[mc.CommError] = mc.ArgumentError if rank == 0 else mc.MismatchError
        with pytest.raises(wrong, match="'add' is a name of the server"):
            server(framework, np.ones(9), rules={"add": rule} if rank == 0 else None)
    # The order of the names is no difference.
    rules = {"b": rule, "a": rule}
    with server(framework, np.zeros(9), rules=rules if rank % 2 else dict(reversed(rules.items()))) as ps:
        ps.send(framework.make(np.ones(9)), "b")
        mc.barrier()
        assert (values(ps.receive()) == size).all()
        mc.barrier()


def test_two_servers_of_a_group(framework: Framework, rank: int, size: int) -> None:
    group = mc.Group([0]) if rank == 0 else None
    if group is not None:
        with server(framework, np.ones(5), group=group) as ps, server(framework, np.ones(5), group=group) as other:
            ps.send(framework.make(np.ones(5)))
            assert (values(ps.receive()) == 2).all()
            assert (values(other.receive()) == 1).all()
        group.free()
    mc.barrier()


@pytest.mark.parametrize("seed", range(3))
def test_random_schedules_have_exact_sums(framework: Framework, seed: int, rank: int, size: int) -> None:
    """Every rank has a schedule of its own; at the end every update was applied once."""
    lengths, chosen = [size, 1000, 70_001], random.Random(100 * seed + rank)
    sums = [0] * len(lengths)
    with server(framework, [np.zeros(length) for length in lengths]) as ps:
        works = []
        for _ in range(30):
            index, number, turn = chosen.randrange(len(lengths)), chosen.randrange(-5, 6), chosen.random()
            update = framework.make(np.full(lengths[index], number, np.float64))
            if turn < 0.4:
                ps.send(update, tensor=index)
                sums[index] += number
            elif turn < 0.6:
                works.append(ps.send(update, scale=-2.0, tensor=index, async_op=True))
                sums[index] -= 2 * number
            elif turn < 0.8:
                works.append(ps.receive(tensor=index, async_op=True))
            else:
                got = values(ps.receive(tensor=index))
                assert (got == np.round(got)).all()
        for work in works:
            work.wait()
        mc.barrier()
        totals = mc.allreduce(np.array(sums))
        assert [set(values(each)) for each in ps.receive()] == [{total} for total in totals]
        mc.barrier()
