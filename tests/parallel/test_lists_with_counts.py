"""Lists of tensors with blocks of different lengths, each tensor with its own, on each framework: against NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dl_comm
from frameworks import Framework, dtype_of, same


class Lists:
    """Lists of arrays of all ranks, the same on all of them: of random lengths, of which many are 0."""

    def __init__(self, seed: int, ranks: int) -> None:
        self.rng, self.ranks = np.random.default_rng(seed), ranks
        self.rests = [tuple(self.rng.integers(0, 4, self.rng.integers(0, 3))) for _ in range(1 + seed % 4)]
        self.types = [dtype_of(str(self.rng.choice(["float32", "int64", "bfloat16", "uint8"]))) for _ in self.rests]

    def extents(self, *shape: int) -> list[Any]:
        """Of each array."""
        return [self.rng.integers(0, 5, shape) for _ in self.rests]

    def arrays(self, rows: list[Any]) -> list[list[Any]]:
        """For each rank a list of arrays with these rows: `rows[array][rank]`."""
        of_rank = [zip(rows, self.rests, self.types, strict=True) for _ in range(self.ranks)]
        return [
            [self.rng.integers(0, 9, (each[rank], *rest)).astype(dtype) for each, rest, dtype in lists]
            for rank, lists in enumerate(of_rank)
        ]


def joined(arrays: list[list[Any]]) -> list[Any]:
    return [np.concatenate(each) for each in zip(*arrays, strict=True)]


def cut(arrays: list[Any], counts: list[Any]) -> list[list[Any]]:
    """The blocks of each array."""
    return [np.split(array, np.cumsum(each)[:-1]) for array, each in zip(arrays, counts, strict=True)]


def plain(counts: list[Any]) -> list[list[int]]:
    return [each.tolist() for each in counts]


Case = Callable[[Framework, Lists, int], tuple[Callable[..., Any], list[Any], list[Any]]]
"""Gives a call, the arrays of this rank that it takes, and what it returns."""


def gathered(framework: Framework, lists: Lists, rank: int, root: int | None, ragged: bool) -> Any:
    counts = lists.extents(lists.ranks)
    arrays = lists.arrays(counts)
    own = {"ragged": True} if ragged else {"counts": plain(counts)}
    expected = joined(arrays)
    if root is None:
        return lambda x, **more: framework.comm.all_gather(x, **own, **more), arrays[rank], expected
    at_root = [framework.on_root(each, rank == root, gathered=True) for each in expected]
    at_root = None if at_root[0] is None else at_root  # no list
    return lambda x, **more: framework.comm.gather(x, root, **own, **more), arrays[rank], at_root


def scattered(framework: Framework, lists: Lists, rank: int) -> Any:
    counts, root = lists.extents(lists.ranks), lists.ranks - 1
    arrays = lists.arrays([np.repeat(each.sum(), lists.ranks) for each in counts])
    expected = [blocks[rank] for blocks in cut(arrays[root], counts)]
    return lambda x, **more: framework.comm.scatter(x, root, counts=plain(counts), **more), arrays[rank], expected


def reduced(framework: Framework, lists: Lists, rank: int, op: str, **factors: float) -> Any:
    counts = lists.extents(lists.ranks)
    arrays = lists.arrays([np.repeat(each.sum(), lists.ranks) for each in counts])
    function = {"sum": np.add.reduce, "max": np.maximum.reduce}[op]
    totals = [function(np.stack(each), dtype=each[0].dtype) for each in zip(*arrays, strict=True)]
    totals = [total * np.array(factors.get("prescale", 1), total.dtype) for total in totals]
    expected = [blocks[rank] for blocks in cut(totals, counts)]
    call = lambda x, **more: framework.comm.reduce_scatter(x, op, counts=plain(counts), **factors, **more)  # noqa: E731
    return call, arrays[rank], expected


def exchanged(framework: Framework, lists: Lists, rank: int, known: bool) -> Any:
    counts = lists.extents(lists.ranks, lists.ranks)  # of sender and receiver
    arrays = lists.arrays([each.sum(1) for each in counts])
    blocks = [cut(arrays[sender], [each[sender] for each in counts]) for sender in range(lists.ranks)]
    expected = [np.concatenate([of[i][rank] for of in blocks]) for i in range(len(counts))]
    own = {"send_counts": [each[rank].tolist() for each in counts]}
    if known:
        own["receive_counts"] = [each[:, rank].tolist() for each in counts]
    return lambda x, **more: framework.comm.all_to_all(x, **own, **more), arrays[rank], expected


CASES: dict[str, Case] = {
    "all_gather": lambda f, lists, rank: gathered(f, lists, rank, None, False),
    "all_gather ragged": lambda f, lists, rank: gathered(f, lists, rank, None, True),
    "gather": lambda f, lists, rank: gathered(f, lists, rank, lists.ranks - 1, False),
    "gather ragged": lambda f, lists, rank: gathered(f, lists, rank, 0, True),
    "scatter": lambda f, lists, rank: scattered(f, lists, rank),
    "reduce_scatter": lambda f, lists, rank: reduced(f, lists, rank, "sum"),
    "reduce_scatter max": lambda f, lists, rank: reduced(f, lists, rank, "max"),
    "reduce_scatter factor": lambda f, lists, rank: reduced(f, lists, rank, "sum", prescale=2.0),
    "all_to_all": lambda f, lists, rank: exchanged(f, lists, rank, True),
    "all_to_all unknown": lambda f, lists, rank: exchanged(f, lists, rank, False),
}


@pytest.mark.parametrize("case", CASES)
def test_every_collective(framework: Framework, case: str, rank: int, size: int) -> None:
    for seed in range(8):
        call, given, expected = CASES[case](framework, Lists(seed, size), rank)
        framework.check(call([framework.make(array) for array in given]), expected)
        found = call([framework.make(array) for array in given], name=f"seed {seed}", by_name=True)
        framework.check(found, expected)


@pytest.mark.modes("function", "session")
@pytest.mark.parametrize("case", CASES)
def test_in_a_graph(framework: Framework, mode: str, case: str, rank: int, size: int) -> None:
    call, given, expected = CASES[case](framework, Lists(3, size), rank)
    same(framework.runner(lambda *x: call(list(x)), mode)(*given), expected)


@pytest.mark.parametrize("case", CASES)
def test_in_a_group(framework: Framework, case: str, rank: int, size: int) -> None:
    """Of the last two ranks, in the other order."""
    members = list(range(size))[-2:][::-1]
    if rank in members:
        with framework.comm.Group(members) as group:
            for seed in range(4):
                call, given, expected = CASES[case](framework, Lists(seed, group.size), group.rank)
                framework.check(call([framework.make(array) for array in given], group=group), expected)


@pytest.mark.needs("async")
def test_in_flight(framework: Framework, rank: int, size: int) -> None:
    """All start at once; each rank waits in its own order. Some have places for their results."""
    started = []
    for seed, case in enumerate(CASES):
        call, given, expected = CASES[case](framework, Lists(seed, size), rank)
        options: dict[str, Any] = {"async_op": True, "name": case}
        if seed % 2 and expected is not None:
            options["out"] = [framework.make(np.zeros_like(array)) for array in expected]
        started.append((call([framework.make(array) for array in given], **options), expected))
    for work, expected in started if rank % 2 else started[::-1]:
        framework.check(work.wait(), expected)


@pytest.mark.needs("async")
def test_counts_of_the_results(framework: Framework, rank: int, size: int) -> None:
    comm, make = framework.comm, framework.make
    counts = [[other + 1 for other in range(size)], [2 * other for other in range(size)]]
    given = [make(np.ones((each[rank], 2))) for each in counts]
    for own in ({"ragged": True}, {"counts": counts}):
        assert comm.all_gather(given, **own, return_counts=True)[1] == counts
    send = [[rank + 1] * size, [0] * size]
    given = [make(np.ones((rank + 1) * size)), make(np.ones(0))]
    received = [list(range(1, size + 1)), [0] * size]
    for own in ({}, {"receive_counts": received}):
        assert comm.all_to_all(given, send_counts=send, **own, return_counts=True)[1] == received


# Calls in which the last rank has other counts of its second array than the others say.
DIFFERENT: dict[str, Callable[[Framework, int, int, int], Any]] = {
    "all_gather": lambda f, odd, rank, size: f.comm.all_gather(
        [f.make(np.ones(2)), f.make(np.ones(3 + odd))], counts=[[2] * size, [3 + odd] * size]
    ),
    "reduce_scatter": lambda f, odd, rank, size: f.comm.reduce_scatter(
        [f.make(np.ones(2 * size)), f.make(np.ones(3 * size))],
        counts=[[2] * size, [3 - odd, *[3] * (size - 2), 3 + odd]],
    ),
    "rows": lambda f, odd, rank, size: f.comm.reduce_scatter(
        [f.make(np.ones((size, 2))), f.make(np.ones((size, 2 + odd)))], counts=[[1] * size] * 2
    ),
    "all_to_all": lambda f, odd, rank, size: f.comm.all_to_all(
        [f.make(np.ones(2 * size)), f.make(np.ones((3 + odd) * size))],
        send_counts=[[2] * size, [3 + odd] * size],
        receive_counts=[[2] * size, [3] * size],
    ),
    "number": lambda f, odd, rank, size: f.comm.all_gather([f.make(np.ones(2))] * (2 + odd), ragged=True),
    "without": lambda f, odd, rank, size: f.comm.reduce_scatter(
        [f.make(np.ones(2 * size))] * 2, **({} if odd else {"counts": [[2] * size] * 2})
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_counts_that_differ_fail_everywhere(framework: Framework, case: str, rank: int, size: int) -> None:
    if size == 1:
        return
    with pytest.raises(dl_comm.MismatchError) as error:
        DIFFERENT[case](framework, int(rank == size - 1), rank, size)
    if case in ("all_gather", "reduce_scatter"):
        odd = [4] * size if case == "all_gather" else [2, *[3] * (size - 2), 4]
        for counts in ([3] * size, odd):
            assert f" of blocks of {', '.join(map(str, counts))} elements" in str(error.value)
    x = framework.make(np.ones(size))
    framework.check(framework.comm.reduce_scatter([x, x], counts=[[1] * size] * 2), [np.full(1, float(size))] * 2)


# Lists of a matrix with 12 rows, of its sums, and of integers, which have no gradients.
LINEAR: dict[str, Callable[[Framework, Any, int, int], Any]] = {
    "all_gather": lambda f, x, rank, size: f.comm.all_gather(
        [x[: rank + 1], f.make(np.ones(rank)), x[: 2 * rank]],
        counts=[range(1, size + 1), range(size), range(0, 2 * size, 2)],
    ),
    "all_gather ragged": lambda f, x, rank, size: f.comm.all_gather(
        [x[: rank + 1], f.make(np.ones(rank, np.int32)), x[: 2 * rank]], ragged=True
    ),
    "gather": lambda f, x, rank, size: f.comm.gather(
        [x[: rank + 1], f.make(np.ones(rank, np.int32)), x[: 2 * rank]],
        size - 1,
        counts=[range(1, size + 1), range(size), range(0, 2 * size, 2)],
    ),
    "gather ragged": lambda f, x, rank, size: f.comm.gather(
        [x[: rank + 1], f.make(np.ones(rank, np.int32)), x[: 2 * rank]], size - 1, ragged=True
    ),
    "scatter": lambda f, x, rank, size: f.comm.scatter(
        [x, f.make(np.ones(4 * size, np.int32)), x[:5]],
        counts=[[12, *[0] * (size - 1)], [4] * size, [*[0] * (size - 1), 5]],
    ),
    "reduce_scatter": lambda f, x, rank, size: f.comm.reduce_scatter(
        [x, f.make(np.ones(4 * size, np.int32)), x[:5]],
        "mean",
        counts=[[12, *[0] * (size - 1)], [4] * size, [*[0] * (size - 1), 5]],
    ),
    "all_to_all": lambda f, x, rank, size: f.comm.all_to_all(
        [x[: size * (rank + 1)], f.make(np.ones(size, np.int32)), x[:rank]],
        send_counts=[[rank + 1] * size, [1] * size, [*[0] * (size - 1), rank]],
    ),
}


@pytest.mark.costly
@pytest.mark.needs("gradients")
@pytest.mark.modes("eager", "function")
@pytest.mark.parametrize("name", LINEAR)
def test_gradients(framework: Framework, mode: str, name: str, rank: int, size: int) -> None:
    """A linear function A and its gradient G are adjoint: over all ranks, <A x, v> = <x, G v>. G's gradient is A."""
    rng = np.random.default_rng(rank)

    def function(x: Any) -> Any:
        one, _, two = LINEAR[name](framework, x, rank, size) or [framework.sum(x) * 0] * 3
        return 2 * framework.sum(two) + one

    def inner(a: Any, b: Any) -> float:
        return dl_comm.allreduce(float((a * b).sum()))

    def run(x: Any, v: Any) -> list[Any]:
        y, gradient = framework.derivative(function, x, v)
        _, again = framework.derivative(lambda v: framework.derivative(function, x, v)[1], v, x)
        return [y, gradient, again]

    x = rng.standard_normal((12, 2))
    v = rng.standard_normal(framework.derivative(function, framework.make(x))[0].shape)
    y, gradient, again = framework.runner(run, mode)(x, v)
    assert inner(y, v) == pytest.approx(inner(x, gradient))
    same(again, y, tolerance=1e-12)


def test_bad_counts(framework: Framework, rank: int, size: int) -> None:
    comm, x = framework.comm, framework.make(np.ones(4 * size))
    one = [4] * size
    bad: list[tuple[Callable[[], Any], str]] = [
        (lambda: comm.reduce_scatter([x, x], counts=one), "a list for each of the 2 arrays"),
        (lambda: comm.reduce_scatter([x, x], counts=[one] * 3), "a list for each of the 2 arrays, not 3"),
        (lambda: comm.reduce_scatter(x, counts=[one, one]), "for each of the 1 arrays"),
        (lambda: comm.all_to_all([x, x], send_counts=[one, [5] * size]), "have the sum"),
        (lambda: comm.all_gather([x, x], counts=[[4 * size] * size, one[1:]]), "for each rank"),
        (lambda: comm.scatter([x, x], counts=[one, [*one[1:], -4]]), "invalid counts"),
    ]
    for call, text in bad:
        with pytest.raises(dl_comm.ArgumentError, match=text):
            call()
    assert comm.allreduce(1) == size
