"""Teams: numbered groups of all ranks, whose means follow a schedule. What optimizers average on.

Thread rule: any thread; collective functions in the same order on all ranks.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from dl_comm import _dl_comm
from dl_comm._arrays.groups import Group, checked_place
from dl_comm._base import log
from dl_comm._base.checks import checked_int, checked_team, seconds
from dl_comm._base.errors import ArgumentError
from dl_comm._job.diagnosis import stats
from dl_comm._job.ranks import get_rank
from dl_comm._job.start import start

_owners = itertools.count(1)
_COOLDOWN = {None: 0, "after": 1, "last": 2}


def config_team(
    team: int,
    trans_alg: int,
    ksteps: int,
    max_steps: int,
    verbosity: int = 0,
    perf_freq: int = 100,
    *,
    cooldown: str | None = None,
) -> None:
    """Sets the schedule of a team, counted in calls of ``gradients`` on it from now on.

    Without a schedule every call blocks. In the non-blocking phase, a call of ``gradients`` starts its own allreduce
    and returns the mean that the previous call (with the same list of tensors) started. So communication overlaps the
    computation of a whole step. Each mean is returned exactly once. The first non-blocking call blocks, because there
    is no previous mean; the second returns zeros. The first blocking call afterwards, or the last of ``max_steps``
    calls, returns the sum of its own mean and the previous one. docs/schedules.md shows this call by call.

    Args:
        team: The team's number, from 0. A missing team is created with the defaults of the environment.
        trans_alg: Transition between phases. 0: abrupt. 1: smooth, over ``max_steps`` / 20 calls, in which a growing
            fraction of each mean carries over to the next call. Scripts for the plugin pass other numbers, such as 16,
            whose meaning is not documented: they count as 1, and rank 0 prints a line.
        ksteps: ``ksteps`` > 0: the first ``ksteps`` calls block (warm-up). ``ksteps`` >= ``max_steps``: all calls
            block. ``ksteps`` < 0: calls block at the end (cool-down); see ``cooldown``. 0: only the last call blocks.
        max_steps: The total number of calls. Later calls block.
        verbosity: 0: silent; 1: rank 0 prints how long it has waited for communication; 2: every rank does.
        perf_freq: Prints after every call whose number, from 0, is a multiple of this (0: never), and at ``finalize``.
        cooldown: The meaning of a negative ``ksteps``. "after": -``ksteps`` calls before the cool-down, as in the
            plugin's porting guide. "last": -``ksteps`` calls in the cool-down, as measured with the plugin of 2018.
            None: ``DL_COMM_COOLDOWN``, else "after" (in the package ``ml_comm``: "last").

    Raises:
        ArgumentError: An argument is out of range.
        StateError: ``init`` was not called, or ``finalize`` was.

    Every rank must set the same schedule: calls with different schedules raise ``MismatchError``.
    """
    if cooldown is not None and (not isinstance(cooldown, str) or cooldown not in _COOLDOWN):
        raise ArgumentError(f"invalid cooldown: {cooldown!r} (expected 'after', 'last' or None)")
    transition = checked_int("trans_alg", trans_alg, 0)
    _dl_comm.config_team(
        checked_int("team", team, 0),
        min(transition, 1),
        checked_int("ksteps", ksteps, -(2**31)),
        checked_int("max_steps", max_steps, 0),
        checked_int("verbosity", verbosity, 0, 2),
        checked_int("perf_freq", perf_freq, 0),
        _COOLDOWN[cooldown],
    )
    if transition > 1 and get_rank() == 0:
        log.warn(f"trans_alg {transition} of team {team} counts as 1, a smooth transition")


def get_waited(team: int = 0) -> float:
    """The seconds that this rank has waited for the team's means; ``config_team`` can print them.

    This is the time from a call to its result; for torch optimizers, the time that backward or ``step()`` waits. Raises
    ArgumentError when the team does not exist.
    """
    return _dl_comm.waited(checked_int("team", team, 0))


def new_owner(holder: Any, team: int) -> int:
    """A number that identifies an optimizer's calls on a schedule; released when ``holder`` is freed."""
    owner = next(_owners)
    weakref.finalize(holder, _dl_comm.release, team, owner).atexit = False
    return owner


def start_team(
    team: int, nteam: int, threads: int | None, nstep: int | None, warmup: float, verb: int, freq: int
) -> None:
    """Creates missing teams for an optimizer on ``team``, and sets the team's schedule if ``nstep`` is given.

    The fraction ``warmup`` of ``nstep`` steps blocks; ``verb`` and ``freq`` are ``verbosity`` and ``perf_freq``.
    """
    start(threads, max(nteam, team + 1))
    if nstep is None:
        return
    if not 0 <= warmup <= 1:
        raise ArgumentError(f"invalid warmup: {warmup!r} (expected the fraction of blocking steps, from 0 to 1)")
    steps = checked_int("nstep", nstep, 0)
    config_team(team, 0, int(warmup * steps), steps, verb, freq)


def start_averages(
    group: Group | None,
    team: Any,
    nteam: int,
    threads: int | None,
    nstep: int | None,
    warmup: float,
    verb: int,
    freq: int,
) -> int:
    """Starts what an optimizer averages on, as ``start_team``, and returns its number for the core.

    Raises ArgumentError when ``group`` is given together with a team or a schedule.
    """
    place = checked_place(group, team)
    if place >= 0:
        start_team(place, nteam, threads, nstep, warmup, verb, freq)
    elif nstep is not None:
        raise ArgumentError("give group or nstep, not both: a group has no schedule")
    return place


def create_team(team: int, nthreads: int = 2, prec_level: int = 0) -> None:
    """Creates a team. Collective.

    Args:
        team: The team's number, from 0.
        nthreads: The number of threads, at least 1. A call uses at most as many as there are processors for each rank.
        prec_level: Accumulator type for float16, bfloat16 and float32: 0: float32, 1: float64.

    Raises:
        ArgumentError: A number is out of range, or the team exists.
        MismatchError: The ranks disagree.
    """
    _dl_comm.create_team(
        checked_team(team), checked_int("nthreads", nthreads, 1), checked_int("prec_level", prec_level, 0, 1)
    )


def set_timeout(timeout: float, team: int | None = None) -> None:
    """Sets the deadline of later calls on a team, instead of ``DL_COMM_TIMEOUT_S``.

    Ranks may set different deadlines. A call that misses its deadline raises ``TimeoutError``. Then the ranks are out
    of sync, and the team refuses further calls.

    Args:
        timeout: In seconds; 0: no limit.
        team: The team's number; None: all existing teams, and broadcasts, barriers and metrics.

    Raises:
        ArgumentError: The timeout is negative or not a number, or the team does not exist.
    """
    if team is not None:
        _dl_comm.set_timeout(checked_int("team", team, 0), seconds(timeout))
        return
    for existing in stats()["teams"]:
        _dl_comm.set_timeout(existing, seconds(timeout))
