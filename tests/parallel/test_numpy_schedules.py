"""Schedules, teams and towers on 1, 2 and 3 ranks: what each call returns, and what is printed about waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

import dl_comm as mc
import ml_comm

TEAM = 1


@pytest.fixture(autouse=True)
def _blocking_again() -> Iterator[None]:
    yield
    mc.config_team(TEAM, 0, 0, 0)


def means(calls: int, rank: int, size: int, first: int = 0, name: int = 3) -> list[float]:
    """What calls return whose means are 1, 2, 4, ..., so that a sum tells what it is made of."""
    returned = []
    for index in range(first, first + calls):
        mine = np.full((name, 2), 2.0**index + rank - (size - 1) / 2, np.float32)
        (mean,) = mc.gradients([mine], TEAM)
        assert mean.dtype == np.float32
        assert mean.shape == (name, 2)
        assert (mean == mean[0, 0]).all()
        assert (mine == mine[0, 0]).all(), "the arguments stay as they are"
        returned.append(float(mean[0, 0]))
    return returned


def m(*indices: int) -> float:
    """The sum of the means of some calls."""
    return float(sum(2.0**index for index in indices))


def test_every_call_of_a_warm_up_and_a_pipeline(rank: int, size: int) -> None:
    mc.config_team(TEAM, 0, 3, 9)
    got = means(12, rank, size)
    blocking, pipelined = [m(0), m(1), m(2)], [m(3), 0.0, m(4), m(5), m(6)]
    assert got == [*blocking, *pipelined, m(7, 8), m(9), m(10), m(11)]


def test_always_blocking(rank: int, size: int) -> None:
    mc.config_team(TEAM, trans_alg=0, ksteps=5, max_steps=5, verbosity=0, perf_freq=100)
    assert means(8, rank, size) == [m(index) for index in range(8)]


@pytest.mark.parametrize("package", [mc, ml_comm], ids=["dl_comm", "ml_comm"])
@pytest.mark.parametrize("cooldown", [None, "after", "last"])
def test_a_cool_down_begins_where_the_package_says(package: object, cooldown: str | None, rank: int, size: int) -> None:
    package.config_team(TEAM, 0, -6, 8, 0, 100, cooldown=cooldown)
    got = means(8, rank, size)
    if (cooldown or ("last" if package is ml_comm else "after")) == "after":
        assert got == [m(0), 0.0, m(1), m(2), m(3), m(4), m(5, 6), m(7)]
    else:
        assert got == [m(0), 0.0, m(1, 2), m(3), m(4), m(5), m(6), m(7)]


@pytest.mark.parametrize("trans_alg", [1, 16])
def test_a_smooth_transition_leaves_a_rising_share(
    trans_alg: int, rank: int, size: int, capfd: pytest.CaptureFixture[str]
) -> None:
    # A window of 2 calls at both ends: the carries are 0, 1/2, 1, 1, ..., 1, 1/2, 0.
    mc.config_team(TEAM, trans_alg, 2, 12)
    line = f"dl_comm: trans_alg 16 of team {TEAM} counts as 1, a smooth transition\n"
    assert capfd.readouterr().err == (line if trans_alg == 16 and rank == 0 else "")
    got = means(12, rank, size)
    carries = [0, 0, 0, 0.5, 1, 1, 1, 1, 1, 1, 0.5, 0]
    before = [0, *carries[:-1]]
    expected = [
        (1 - a) * m(i) + b * (m(i - 1) if i else 0) for i, (a, b) in enumerate(zip(carries, before, strict=True))
    ]
    assert got == expected
    assert sum(got) == m(*range(12)), "every mean is returned once"


def test_a_change_of_schedule_loses_nothing(rank: int, size: int) -> None:
    mc.config_team(TEAM, 0, 0, 100)
    assert means(3, rank, size) == [m(0), 0.0, m(1)]
    mc.config_team(TEAM, 0, 1, 1)
    assert means(2, rank, size, first=3) == [m(2, 3), m(4)]


def test_two_lists_on_one_team(rank: int, size: int) -> None:
    mc.config_team(TEAM, 0, 2, 8)
    got = [means(1, rank, size, first=index, name=2 + index % 2)[0] for index in range(8)]
    assert got == [m(0), m(1), m(2), m(3), 0.0, 0.0, m(4, 6), m(5, 7)]


def test_names_tell_equal_lists_apart(rank: int, size: int) -> None:
    mc.config_team(TEAM, 0, 0, 8)
    got = [float(mc.gradients([np.float64([2.0**i])], TEAM, name="ab"[i % 2])[0][0]) for i in range(8)]
    assert got == [m(0), m(1), 0.0, 0.0, m(2), m(3), m(4, 6), m(5, 7)]


def test_integers_and_halves(rank: int, size: int) -> None:
    mc.config_team(TEAM, 1, 0, 40)
    total = [np.zeros(3, np.int64), np.zeros(3, np.float64)]
    for index in range(40):
        arrays = [np.full(3, index + rank * 2, np.int32), np.full(3, index + rank, np.float16)]
        for sum_, mean in zip(total, mc.gradients(arrays, TEAM), strict=True):
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


def test_ranks_with_other_schedules_do_not_match(rank: int, size: int) -> None:
    mc.config_team(TEAM, 0, 1 if rank == 0 else 3, 9)
    failures = []
    for _ in range(4):
        try:
            mc.gradients([np.ones(3, np.float32)], TEAM)
        except mc.MismatchError as error:
            failures.append(str(error))
    # Rank 0 leaves the calls 2 and 3 to the ones after them, of which one comes; the others block on them.
    assert len(failures) == (0 if size == 1 else 1 if rank == 0 else 2)
    assert all("(call 2 of 9, non-blocking)" in text and "(call 2 of 9, blocking)" in text for text in failures[:1])
    mc.config_team(TEAM, 0, 0, 0)
    if rank == 0 and size > 1:  # hears of call 3 now
        with pytest.raises(mc.MismatchError, match="call 3 of 9, non-blocking"):
            mc.gradients([np.ones(3, np.float32)], TEAM)
    else:
        mc.gradients([np.ones(3, np.float32)], TEAM)


def test_two_teams_in_opposite_order_from_two_threads(rank: int, size: int) -> None:
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
            (mean,) = mc.gradients([np.full(5, index + rank + 10 * team, np.float32)], team)
            if not (mean == index + (size - 1) / 2 + 10 * team).all():
                failures.append(f"team {team}, round {index}: {mean}")

    threads = [threading.Thread(target=drive, args=(team,)) for team in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_towers_are_averaged_too(rank: int, size: int) -> None:
    towers = [[np.full((2, 3), rank + 10.0 * tower), np.full(4, tower, np.int32)] for tower in range(3)]
    for means_ in mc.gradients(towers, 0):
        assert (means_[0] == (size - 1) / 2 + 10).all()
        assert (means_[1] == 1).all()
    with pytest.raises(mc.ArgumentError, match="tower 1 has 1"):
        mc.gradients([towers[0], towers[1][:1]], 0)
    with pytest.raises(mc.ArgumentError, match="tower"):
        mc.gradients([towers[0], towers[1][::-1]], 0)
    with pytest.raises(mc.ArgumentError, match="None"):
        mc.gradients([towers[0], [None, None]], 0)


def test_towers_on_a_schedule(rank: int, size: int) -> None:
    mc.config_team(TEAM, 0, 0, 5)
    got = []
    for index in range(5):
        towers = mc.gradients([[np.full(3, 2.0**index + rank)], [np.full(3, 2.0**index - rank)]], TEAM)
        assert (towers[0][0] == towers[1][0]).all()
        got.append(float(towers[0][0][0]))
    assert got == [m(0), 0.0, m(1), m(2), m(3, 4)]
