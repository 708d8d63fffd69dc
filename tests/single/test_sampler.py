"""``training.DistributedSampler``: which samples a rank takes, for any number of samples and ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dl_comm
from dl_comm.training import DistributedSampler
from launch import Finished

LENGTHS, RANKS, SEEDS = st.integers(0, 200), st.integers(1, 17), st.integers(0, 2**40)


def parts(length: int, ranks: int, epoch: int = 0, **options: Any) -> list[list[int]]:
    """The indices of each rank."""
    samplers = [DistributedSampler(length, ranks, rank, **options) for rank in range(ranks)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    found = [list(sampler) for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == [len(part) for part in found]
    return found


def in_turn(found: list[list[int]]) -> list[int]:
    """The samples of all ranks, in the order of the steps."""
    steps = range(max(map(len, found), default=0))
    return [part[step] for step in steps for part in found if step < len(part)]


@settings(deadline=None)
@given(length=LENGTHS, ranks=RANKS, seed=SEEDS, epoch=st.integers(0, 2**40), shuffle=st.booleans())
def test_all_ranks_have_parts_of_one_order(length: int, ranks: int, seed: int, epoch: int, shuffle: bool) -> None:
    options = {"seed": seed, "shuffle": shuffle}
    (whole,) = parts(length, 1, epoch, **options)
    assert sorted(whole) == list(range(length))
    assert shuffle or whole == list(range(length))

    once = parts(length, ranks, epoch, even=False, **options)
    assert in_turn(once) == whole
    assert max(map(len, once)) - min(map(len, once)) <= 1

    padded = parts(length, ranks, epoch, **options)
    assert {len(part) for part in padded} == {-(-length // ranks)}
    together = in_turn(padded)
    assert together[:length] == whole
    assert together[length:] == (whole * ranks)[: len(together) - length]
    counts = Counter(together).values()
    assert length < ranks or max(counts) <= 2

    dropped = parts(length, ranks, epoch, even="drop", **options)
    assert {len(part) for part in dropped} == {length // ranks}
    assert in_turn(dropped) == whole[: length // ranks * ranks]
    assert dropped == parts(length, ranks, epoch, drop_last=True, **options)
    assert dropped == parts(length, ranks, epoch, drop_last=True, even="drop", **options)


@settings(deadline=None)
@given(length=st.integers(20, 200), ranks=st.integers(1, 7), seed=SEEDS, epoch=st.integers(0, 1000))
def test_epochs_and_seeds_have_other_orders(length: int, ranks: int, seed: int, epoch: int) -> None:
    # Orders of 20 and more samples are equal by chance once in 20!.
    orders = [
        in_turn(parts(length, ranks, number, seed=base, even=False))
        for number, base in [(epoch, seed), (epoch + 1, seed)]
    ]
    orders.append(in_turn(parts(length, ranks, epoch, seed=seed + 1, even=False)))
    assert len(set(map(tuple, orders))) == 3
    assert in_turn(parts(length, ranks, epoch, seed=seed, even=False)) == orders[0]


def test_a_dataset_is_what_has_a_length() -> None:
    dataset = ["a", "b", "c"]
    sampler = DistributedSampler(dataset, 2, 1, shuffle=False)
    assert (list(sampler), len(sampler), sampler.dataset) == ([1, 0], 2, dataset)
    dataset.append("d")  # it may grow
    assert list(sampler) == [1, 3]
    assert (sampler.num_replicas, sampler.rank, sampler.epoch, sampler.drop_last) == (2, 1, 0, False)
    assert all(type(index) is int for index in DistributedSampler(5, 1, 0))


@pytest.mark.parametrize(
    ("words", "arguments", "options"),
    [
        ("invalid dataset: ", (iter([1]),), {}),
        ("invalid dataset: -1", (-1,), {}),
        ("invalid num_replicas: 0", (3, 0), {}),
        ("invalid rank: 2", (3, 2, 2), {}),
        ("invalid rank: -1", (3, None, -1), {}),
        ("invalid shuffle: 'no'", (3,), {"shuffle": "no"}),
        ("invalid seed: -1", (3,), {"seed": -1}),
        ("invalid even: 'pad'", (3,), {"even": "pad"}),
        ("drop_last=True leaves samples out, and even=False", (3,), {"even": False, "drop_last": True}),
    ],
)
def test_invalid_arguments_are_named(words: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    with pytest.raises(dl_comm.ArgumentError, match=words):
        DistributedSampler(*arguments, **options)
    with pytest.raises(dl_comm.ArgumentError, match="invalid epoch: 0.5"):
        DistributedSampler(3).set_epoch(0.5)  # type: ignore[arg-type]


def test_the_ranks_of_the_job_are_read_when_needed(script: Callable[..., Finished]) -> None:
    text = """
import sys
import dl_comm
from dl_comm.training import DistributedSampler
sampler = DistributedSampler(5, shuffle=False, even=False)
import json
assert json.loads(dl_comm._dl_comm.describe())["state"] != "started"
own = list(sampler)
assert own == list(range(5))[dl_comm.rank()::2] and len(sampler) == len(own) == 3 - dl_comm.rank(), own
assert "torch" not in sys.modules
# Ranks with fewer samples wait in join.
dl_comm.init()
import numpy as np
for _ in sampler: dl_comm.gradients([np.ones(2)], 0)
assert dl_comm.join() == 0
try: DistributedSampler(5, num_replicas=1, rank=None if dl_comm.rank() else 3)
except dl_comm.ArgumentError: pass
print("fine")
"""
    finished = script(2, text)
    assert finished.output.count("fine") == 2, finished.output


@settings(deadline=None)
@given(
    length=LENGTHS,
    before=RANKS,
    after=RANKS,
    steps=st.integers(0, 40),
    even=st.sampled_from([True, False, "drop"]),
    shuffle=st.booleans(),
)
def test_the_rest_of_an_epoch_after_a_break(
    length: int, before: int, after: int, steps: int, even: Any, shuffle: bool
) -> None:
    """On any number of ranks: each sample once, but for the last ones, which `even` repeats or leaves out."""
    options = {"seed": 3, "even": even, "shuffle": shuffle}
    first = [DistributedSampler(length, before, rank, **options) for rank in range(before)]
    for sampler in first:
        sampler.set_epoch(2)
    steps = min(steps, *(len(sampler) for sampler in first))
    for sampler in first:
        sampler.advance(steps)
    (state,) = {tuple(sampler.state_dict().items()) for sampler in first}
    assert dict(state) == {"epoch": 2, "taken": steps * before, "length": length, "seed": 3}

    second = [DistributedSampler(length, after, rank, **options) for rank in range(after)]
    for sampler in second:
        sampler.load_state_dict(dict(state))
        sampler.set_epoch(2)  # as the loop of a script does
    lengths = [len(sampler) for sampler in second]
    rest = in_turn([list(sampler) for sampler in second])
    assert lengths == [len(sampler) for sampler in second]
    assert even is False or len(set(lengths)) == 1
    (whole,) = parts(length, 1, 2, seed=3, shuffle=shuffle)
    left = whole[steps * before :]
    assert rest[: len(left)] == left[: len(rest)]
    assert abs(len(rest) - len(left)) < after
    assert {True: len(rest) >= len(left), "drop": len(rest) <= len(left), False: len(rest) == len(left)}[even]
    # A break in the rest, too; and the next epoch, and the next pass, are whole.
    for sampler in second:
        assert sampler.state_dict()["taken"] == min(steps * before, length)
        assert len(list(sampler)) == len(DistributedSampler(length, after, sampler.rank, even=even))
        sampler.load_state_dict(dict(state))
        sampler.set_epoch(3)
        assert sampler.state_dict() == {"epoch": 3, "taken": 0, "length": length, "seed": 3}
        assert len(list(sampler)) == len(DistributedSampler(length, after, sampler.rank, even=even))


def test_a_state_of_something_else() -> None:
    sampler = DistributedSampler(10, 2, 0, seed=1)
    sampler.advance(5)
    state = sampler.state_dict()
    for wrong in (None, {}, {**state, "more": 1}):
        with pytest.raises(dl_comm.ArgumentError, match="that of a DistributedSampler"):
            sampler.load_state_dict(wrong)  # type: ignore[arg-type]
    for wrong in ({**state, "length": 9}, {**state, "seed": 0}):
        with pytest.raises(dl_comm.ArgumentError, match="this sampler has 10, with seed 1"):
            sampler.load_state_dict(wrong)
    with pytest.raises(dl_comm.ArgumentError, match="invalid taken: -1"):
        sampler.load_state_dict({**state, "taken": -1})
    with pytest.raises(dl_comm.ArgumentError, match="invalid samples: 1 .expected an integer from 0 to 0"):
        sampler.advance(1)
    assert sampler.state_dict() == state == {"epoch": 0, "taken": 10, "length": 10, "seed": 1}
