"""Schedules, teams and towers on the arrays of each framework, on 1, 2 and 3 ranks: what each call returns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import dl_comm as mc
import ml_comm
from frameworks import Framework, same

TEAM = 1


@pytest.fixture(autouse=True)
def _blocking_again() -> Iterator[None]:
    yield
    mc.config_team(TEAM, 0, 0, 0)


@pytest.fixture
def means(framework: Framework, mode: str, rank: int, size: int) -> Callable[..., list[float]]:
    """What calls return whose means are 1, 2, 4, ..., so that a sum tells what it is made of."""

    def average(x: Any) -> list[Any]:
        (mean,) = mc.gradients([x], TEAM)
        kept = x + 0
        if framework.supports("out"):
            x[:] = -1.0  # the caller's again, also while the average is under way
        return [mean, kept]

    program = framework.runner(average, mode)

    def means(calls: int, first: int = 0, rows: int = 3) -> list[float]:
        returned = []
        for index in range(first, first + calls):
            given = np.full((rows, 2), 2.0**index + rank - (size - 1) / 2, np.float32)
            mean, kept = program(given)
            same(kept, given)
            same(mean, np.full((rows, 2), mean[0, 0]))
            returned.append(float(mean[0, 0]))
        return returned

    return means


def m(*indices: int) -> float:
    """The sum of the means of some calls."""
    return float(sum(2.0**index for index in indices))


def test_every_call_of_a_warm_up_and_a_pipeline(means: Callable[..., list[float]]) -> None:
    mc.config_team(TEAM, 0, 3, 9)
    blocking, pipelined = [m(0), m(1), m(2)], [m(3), 0.0, m(4), m(5), m(6)]
    assert means(12) == [*blocking, *pipelined, m(7, 8), m(9), m(10), m(11)]


def test_always_blocking(means: Callable[..., list[float]]) -> None:
    mc.config_team(TEAM, trans_alg=0, ksteps=5, max_steps=5, verbosity=0, perf_freq=100)
    assert means(8) == [m(index) for index in range(8)]


@pytest.mark.parametrize("package", [mc, ml_comm], ids=["dl_comm", "ml_comm"])
@pytest.mark.parametrize("cooldown", [None, "after", "last"])
def test_a_cool_down_begins_where_the_package_says(
    means: Callable[..., list[float]], package: Any, cooldown: str | None
) -> None:
    package.config_team(TEAM, 0, -6, 8, 0, 100, cooldown=cooldown)
    if (cooldown or ("last" if package is ml_comm else "after")) == "after":
        assert means(8) == [m(0), 0.0, m(1), m(2), m(3), m(4), m(5, 6), m(7)]
    else:
        assert means(8) == [m(0), 0.0, m(1, 2), m(3), m(4), m(5), m(6), m(7)]


@pytest.mark.parametrize("trans_alg", [1, 16])
def test_a_smooth_transition_leaves_a_rising_share(
    means: Callable[..., list[float]], trans_alg: int, rank: int, capfd: pytest.CaptureFixture[str]
) -> None:
    # A window of 2 calls at both ends: the carries are 0, 1/2, 1, 1, ..., 1, 1/2, 0.
    mc.config_team(TEAM, trans_alg, 2, 12)
    line = f"dl_comm: trans_alg 16 of team {TEAM} counts as 1, a smooth transition\n"
    assert capfd.readouterr().err == (line if trans_alg == 16 and rank == 0 else "")
    got = means(12)
    carries = [0, 0, 0, 0.5, 1, 1, 1, 1, 1, 1, 0.5, 0]
    before = [0, *carries[:-1]]
    expected = [
        (1 - a) * m(i) + b * (m(i - 1) if i else 0) for i, (a, b) in enumerate(zip(carries, before, strict=True))
    ]
    assert got == expected
    assert sum(got) == m(*range(12)), "every mean is returned once"


def test_a_change_of_schedule_loses_nothing(means: Callable[..., list[float]]) -> None:
    mc.config_team(TEAM, 0, 0, 100)
    assert means(3) == [m(0), 0.0, m(1)]
    mc.config_team(TEAM, 0, 1, 1)
    assert means(2, first=3) == [m(2, 3), m(4)]


def test_two_lists_on_one_team(means: Callable[..., list[float]]) -> None:
    mc.config_team(TEAM, 0, 2, 8)
    got = [means(1, first=index, rows=2 + index % 2)[0] for index in range(8)]
    assert got == [m(0), m(1), m(2), m(3), 0.0, 0.0, m(4, 6), m(5, 7)]


def test_names_tell_equal_lists_apart(framework: Framework, mode: str) -> None:
    programs = [framework.runner(lambda x, name=name: mc.gradients([x], TEAM, name=name), mode) for name in "ab"]
    mc.config_team(TEAM, 0, 0, 8)
    got = [programs[i % 2](np.float64([2.0**i]))[0].item() for i in range(8)]
    assert got == [m(0), m(1), 0.0, 0.0, m(2), m(3), m(4, 6), m(5, 7)]


def test_integers_and_halves(framework: Framework, mode: str, rank: int, size: int) -> None:
    program = framework.runner(lambda *arrays: mc.gradients(list(arrays), TEAM), mode)
    mc.config_team(TEAM, 1, 0, 40)
    total = [np.zeros(3, np.int64), np.zeros(3, np.float64)]
    for index in range(40):
        arrays = [np.full(3, index + rank * 2, np.int32), np.full(3, index + rank, np.float16)]
        for sum_, mean in zip(total, program(*arrays), strict=True):
            sum_ += mean.astype(sum_.dtype)
    assert (total[0] == sum(range(40)) + 40 * (size - 1)).all()
    np.testing.assert_allclose(total[1], sum(range(40)) + 40 * (size - 1) / 2, rtol=1e-3)


@pytest.mark.parametrize(
    "arguments",
    [(-1, 0, 1, 1), (TEAM, -1, 1, 1), (TEAM, 0, 1, -1), (TEAM, 0, 1, 1, 3), (TEAM, 0, 1, 1, 1, -1), (TEAM, 0, 1.5, 1)],
)
def test_nonsense_is_refused(arguments: tuple[int, ...]) -> None:
    with pytest.raises(mc.ArgumentError):
        mc.config_team(*arguments)
    with pytest.raises(mc.ArgumentError, match="'last'"):
        mc.config_team(TEAM, 0, 1, 1, cooldown="never")


def test_ranks_with_other_schedules_do_not_match(framework: Framework, mode: str, rank: int, size: int) -> None:
    program = framework.runner(lambda x: mc.gradients([x], TEAM), mode)
    ones = np.ones(3, np.float32)
    mc.config_team(TEAM, 0, 1 if rank == 0 else 3, 9)
    failures = []
    for _ in range(4):
        try:
            program(ones)
        except (mc.MismatchError, *framework.graph_errors) as error:
            failures.append(str(error))
    # Rank 0 leaves the calls 2 and 3 to the ones after them, of which one comes; the others block on them.
    assert len(failures) == (0 if size == 1 else 1 if rank == 0 else 2)
    assert all("(call 2 of 9, non-blocking)" in text and "(call 2 of 9, blocking)" in text for text in failures[:1])
    mc.config_team(TEAM, 0, 0, 0)
    if rank == 0 and size > 1:  # hears of call 3 now
        with framework.raises(mc.MismatchError, match="call 3 of 9, non-blocking", mode=mode):
            program(ones)
    else:
        program(ones)


def test_two_teams_in_opposite_order_from_two_threads(framework: Framework, rank: int, size: int) -> None:
    rounds = 1000
    failures: list[str] = []
    turn = threading.Semaphore(1)

    def drive(team: int) -> None:
        for index in range(rounds):
            # On even ranks team 0 starts its call first, on odd ones team 1 does.
            if (team == 0) == (rank % 2 == 0):
                turn.release()
            else:
                turn.acquire()
            (mean,) = mc.gradients([framework.make(np.full(5, index + rank + 10 * team, np.float32))], team)
            if not (framework.array(mean) == index + (size - 1) / 2 + 10 * team).all():
                failures.append(f"team {team}, round {index}: {mean}")

    threads = [threading.Thread(target=drive, args=(team,)) for team in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_towers_are_averaged_too(framework: Framework, mode: str, rank: int, size: int) -> None:
    arrays = [
        each for tower in range(3) for each in (np.full((2, 3), rank + 10.0 * tower), np.full(4, tower, np.int32))
    ]
    program = framework.runner(lambda *x: mc.gradients([x[:2], x[2:4], x[4:]], 0), mode)
    for floats, integers in program(*arrays):
        same(floats, np.full((2, 3), (size - 1) / 2 + 10))
        same(integers, np.full(4, 1, np.int32))


def test_unequal_towers_are_refused(framework: Framework, rank: int, size: int) -> None:
    one, other = ([framework.make(np.ones((2, 3))), framework.make(np.ones(4, np.int32))] for _ in range(2))
    for towers, text in (
        ([one, other[:1]], "tower 1 has 1"),
        ([one, other[::-1]], "tower"),
        ([one, [None] * 2], "None"),
    ):
        with pytest.raises(mc.ArgumentError, match=text):
            mc.gradients(towers, 0)
    assert mc.allreduce(1) == size


def test_towers_on_a_schedule(framework: Framework, mode: str, rank: int, size: int) -> None:
    program = framework.runner(lambda a, b: mc.gradients([[a], [b]], TEAM), mode)
    mc.config_team(TEAM, 0, 0, 5)
    got = []
    for index in range(5):
        (one,), (other,) = program(np.full(3, 2.0**index + rank), np.full(3, 2.0**index - rank))
        same(one, other)
        got.append(float(one[0]))
    assert got == [m(0), 0.0, m(1), m(2), m(3, 4)]


@pytest.mark.needs("gradients")
def test_gradients_of_towers(framework: Framework, mode: str, rank: int, size: int) -> None:
    def first(x: Any) -> Any:
        return mc.gradients([[x], [2.0 * x]], 0)[0][0]

    program = framework.runner(lambda x, v: framework.derivative(first, x, v), mode)
    mean, gradient = program(np.full(2, float(rank)), np.full(2, rank + 1.0))
    same(mean, np.full(2, (size - 1) / 2 * 1.5))
    # Each tower has half of the mean over the ranks of the upstream gradients, once and twice.
    same(gradient, np.full(2, (size + 1) / 2 / 2 * 3))
