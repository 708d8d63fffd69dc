"""The process in its job: start, end, ranks, teams."""

from __future__ import annotations

import atexit
import itertools
import operator
import os
import sys
import traceback
import weakref
from typing import Any

import numpy as np

from dl_comm import _dl_comm
from dl_comm._diagnosis import stats
from dl_comm._errors import ArgumentError, DTypeError, translate

_owners = itertools.count(1)
CONTROL_TEAM = -1
"""The team of broadcasts, barriers and metrics."""

_COOLDOWN = {None: 0, "after": 1, "last": 2}
_FRAMEWORKS = (None, "numpy", "tensorflow", "keras", "torch")


def init_mpi() -> None:
    """Brings MPI up, or adopts an MPI that mpi4py or another library has brought up. Collective.

    Afterwards ranks and sizes are known; ``init`` does it where it was not done.

    In a process that a rank has started or forked, such as a worker of a data loader, nothing happens: it is a helper
    of the rank, knows its numbers, and what communicates raises StateError. Programs that the process starts do not
    get the launcher's variables (``PMI_RANK`` and the like); ``docs/environment.md`` has ``DL_COMM_ALONE``.

    Raises:
        CommError: MPI cannot be brought up, or the launcher cannot be used: each process would train alone.
    """
    _dl_comm.init_mpi()
    sync_environment()


def sync_environment() -> None:
    """Makes ``os.environ``, which children often get, show what the core has changed in the environment."""
    now = _dl_comm.environment()
    for name in [name for name in os.environb if name not in now]:
        del os.environb[name]
    helper_mark = b"DL_COMM_HELPER_OF"
    if helper_mark in now:
        os.environb[helper_mark] = now[helper_mark]


def init(
    nthread_per_team: int | None = None,
    nteams: int = 1,
    msglen: int = 0,
    framework: str | None = None,
    *,
    pin_gpu: bool = False,
) -> None:
    """Starts dl_comm. Collective, with the same arguments on all ranks.

    Args:
        nthread_per_team: Threads of each team that carry its averages, from 1; None is ``DL_COMM_DEFAULT_NTHREADS``,
            which is 2 by default.
        nteams: Teams to create, numbered from 0. Reductions of different teams run side by side.
        msglen: Number of elements that will be averaged together. A hint; any length works.
        framework: ``"tensorflow"``, ``"keras"`` or ``"torch"`` loads that framework's operations now (and builds them
            where that was not done) instead of at their first use; None and ``"numpy"`` need none.
        pin_gpu: Leaves each rank one GPU, those of a host by turns; more ranks than GPUs share them, which rank 0 of
            the host says. To be called before anything uses CUDA: the process then sees that GPU only, as GPU 0. (In
            a process where torch has used CUDA already, its current device is set.) Without GPUs nothing happens.

    Raises:
        ArgumentError: An argument is out of range.
        MismatchError: The ranks ask for different teams.
        StateError: ``pin_gpu`` comes after TensorFlow has used its GPUs.
        TimeoutError: A rank did not come in time. (Where MPI itself waits for it, the process ends with status 1.)
        CommError: MPI, memory or threads are not to be had, or the settings of a rank are wrong. All ranks get it.

    Calling it again creates the teams that are missing. In a helper of a rank (see ``init_mpi``) nothing happens.
    """
    if framework not in _FRAMEWORKS:
        raise ArgumentError(f"framework is {framework!r}; it is one of {', '.join(map(repr, _FRAMEWORKS))}")
    threads = 0 if nthread_per_team is None else _checked_int("nthread_per_team", nthread_per_team, 1)
    teams = _checked_int("nteams", nteams, 1)
    _checked_int("msglen", msglen, 0, 2**63)
    if _dl_comm.is_helper():
        return
    init_mpi()
    if pin_gpu:
        from dl_comm._gpus import pin

        pin()
    _dl_comm.init_teams(teams, threads)
    if framework in ("tensorflow", "keras"):
        import dl_comm.tensorflow
    elif framework == "torch":
        import dl_comm.torch  # noqa: F401


def ensure_initialized() -> None:
    """Calls ``init`` with its defaults when nobody has: what the faces that work straight after the import do."""
    if not _dl_comm.is_initialized():
        init()


def _checked_int(name: str, value: Any, low: int, high: int = 2**31 - 1) -> int:
    """``value`` as an int; NumPy's integers and the like, which scripts compute, count too."""
    try:
        number = operator.index(value)
    except TypeError:
        number = low - 1
    if not low <= number <= high:
        raise ArgumentError(f"{name} is {value!r}; it is a whole number from {low} to {high}")
    return number


def checked_team(team: Any) -> int:
    """The number of a team as an int. Raises ArgumentError when it is none."""
    return _number("team", team)


def checked_root(root: Any) -> int:
    """The rank that has the values, as an int. Raises ArgumentError for what is no rank, however many there are."""
    return _number("rank", root, "root")


def _number(what: str, value: Any, argument: str | None = None) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number < 2**31:
        raise ArgumentError(f"{argument or what} {value!r} is out of range; {what}s go from 0")
    return number


def checked_name(name: Any) -> None:
    """Raises DTypeError when the name of a call is not a text, ArgumentError when the core cannot take it."""
    if name is None:
        return
    if not isinstance(name, str):
        raise DTypeError(f"name is {name!r}; it is a text")
    if "\0" in name or not name.isascii() and name.encode(errors="ignore").decode() != name:
        raise ArgumentError(f"name is {name!r}; it is Unicode text without NUL characters")


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
    """Sets the schedule of a team's averages, counted in calls of ``gradients`` on it from now on.

    Without a schedule every call blocks. In the non-blocking phase a call of ``gradients`` starts the average of what
    it is given and returns the average that the call before has started (on the same list of tensors), so that
    communication runs behind the computation of a whole step. Every average is returned exactly once: the first
    non-blocking call blocks on its own (there is none before it), the second returns zeros, and the first blocking
    call afterwards, or the last of ``max_steps`` calls, returns the sum of its own average and the one before.
    docs/schedules.md shows this call by call.

    Args:
        team: The team's number, from 0. A team that does not exist is created with the defaults of the environment.
        trans_alg: How phases change: 0 at once; 1 smoothly, over a twentieth of ``max_steps``, in which a rising share
            of each average is left to the next call. Scripts for the plugin pass other numbers, 16 for one, of which no
            document says what they mean: they are taken as 1, and rank 0 prints a line that says so.
        ksteps: ``ksteps`` > 0: the first ``ksteps`` calls block (warm-up). ``ksteps`` >= ``max_steps``: all calls
            block. ``ksteps`` < 0: calls block at the end (cool-down), from where ``cooldown`` says. 0: none blocks but
            the last.
        max_steps: The number of calls in all. Calls after these block.
        verbosity: 0: silent; 1: rank 0 prints how long it has waited for communication; 2: every rank does.
        perf_freq: It prints after every call whose number, counted from 0, is a multiple of this (0: never), and at
            ``finalize``.
        cooldown: What a negative ``ksteps`` counts: "after": the calls before the cool-down, as the plugin's porting
            guide says; "last": the calls of the cool-down, as the plugin of 2018 was measured to do. None is what
            ``DL_COMM_COOLDOWN`` says, else "after"; in the package ``ml_comm``, else "last".

    Raises:
        ArgumentError: An argument is out of range.
        StateError: ``init`` was not called, or ``finalize`` was.

    Every rank must set the same schedule: averages on different schedules get a ``MismatchError``.
    """
    if cooldown not in _COOLDOWN:
        raise ArgumentError(f"cooldown is {cooldown!r}; it is 'after', 'last' or None")
    transition = _checked_int("trans_alg", trans_alg, 0)
    _dl_comm.config_team(
        _checked_int("team", team, 0),
        min(transition, 1),
        _checked_int("ksteps", ksteps, -(2**31)),
        _checked_int("max_steps", max_steps, 0),
        _checked_int("verbosity", verbosity, 0, 2),
        _checked_int("perf_freq", perf_freq, 0),
        _COOLDOWN[cooldown],
    )
    if transition > 1 and get_rank() == 0:
        print(f"dl_comm: trans_alg {transition} of team {team} is taken as 1, a smooth transition", file=sys.stderr)


def get_waited(team: int = 0) -> float:
    """For how many seconds this rank has waited for averages of the team: what ``config_team`` lets it print.

    The time from a call to its result; for optimizers of torch the time in which backward or ``step()`` waits. Raises
    ArgumentError when there is no such team.
    """
    return _dl_comm.waited(_checked_int("team", team, 0))


def new_owner(holder: Any, team: int) -> int:
    """A number for an optimizer, under which its averages on a schedule are its own; given back when it goes."""
    owner = next(_owners)
    weakref.finalize(holder, _dl_comm.release, team, owner).atexit = False
    return owner


def start_team(
    team: int, nteam: int, nthread_per_team: int, nstep: int | None, warmup: float, verb: int, freq: int
) -> None:
    """Creates the teams that an optimizer on ``team`` lacks, and sets the team's schedule when ``nstep`` is given.

    The share ``warmup`` of ``nstep`` steps blocks then; ``verb`` and ``freq`` are the last two of ``config_team``.
    """
    init(nthread_per_team, max(nteam, team + 1))
    if nstep is None:
        return
    if not 0 <= warmup <= 1:
        raise ArgumentError(f"warmup is {warmup!r}; it is the share of the steps that block, from 0 to 1")
    steps = _checked_int("nstep", nstep, 0)
    config_team(team, 0, int(warmup * steps), steps, verb, freq)


def create_team(team: int, nthreads: int = 2, prec_level: int = 0) -> None:
    """Creates one more team. Collective.

    Args:
        team: Its number, from 0.
        nthreads: Its threads, from 1.
        prec_level: 0 adds float16, bfloat16 and float32 up in float32, 1 in float64.

    Raises:
        ArgumentError: A number is out of range, or the team exists.
        MismatchError: The ranks disagree.
    """
    _dl_comm.create_team(
        checked_team(team), _checked_int("nthreads", nthreads, 1), _checked_int("prec_level", prec_level, 0, 1)
    )


def finalize() -> None:
    """Ends the teams, and MPI where dl_comm brought it up. Collective; calling it again does nothing.

    Waits for the other ranks, up to ``DL_COMM_TIMEOUT_S``, after a failure too: a launcher would end them with this
    one. If they do not come, it says so in a line, and the status of the process will be 1 where it would be 0. Runs by
    itself at the end of the interpreter.
    """
    _dl_comm.finalize()


def is_initialized() -> bool:
    """Whether ``init`` has succeeded and ``finalize`` was not called."""
    return _dl_comm.is_initialized()


def get_rank() -> int:
    """The rank of this process, from 0. Valid after ``init_mpi``."""
    return _dl_comm.rank()


def get_nranks() -> int:
    """The number of processes. Valid after ``init_mpi``."""
    return _dl_comm.size()


def get_localrank() -> int:
    """The rank of this process among those of its host, from 0. Valid after ``init_mpi``."""
    return _dl_comm.local_rank()


def local_size() -> int:
    """The number of processes on this host. Valid after ``init_mpi``."""
    return _dl_comm.local_size()


def num_hosts() -> int:
    """The number of hosts: sets of processes that share memory. Valid after ``init_mpi``."""
    return _dl_comm.hosts()


rank = get_rank
size = get_nranks
local_rank = get_localrank


def barrier(*, timeout: float | None = None) -> None:
    """Returns when every rank has called it. Collective.

    Args:
        timeout: The longest that it may take, in seconds, instead of ``DL_COMM_TIMEOUT_S``; 0 for no limit.

    Raises:
        TimeoutError: A rank did not come in time.
        PeerLostError: A rank has ended.
    """
    _dl_comm.barrier(seconds(timeout))


def set_timeout(timeout: float, team: int | None = None) -> None:
    """Sets how long coming calls on a team may take, instead of ``DL_COMM_TIMEOUT_S``.

    The ranks need not agree on it. A call that misses its deadline raises ``TimeoutError``, and the team refuses
    further calls: the ranks are out of step then.

    Args:
        timeout: In seconds; 0 for no limit.
        team: The team's number; None for all that there are, and for broadcasts, barriers and metrics.

    Raises:
        ArgumentError: The timeout is negative or no number, or there is no such team.
    """
    if team is not None:
        _dl_comm.set_timeout(_checked_int("team", team, 0), seconds(timeout))
        return
    for existing in stats()["teams"]:
        _dl_comm.set_timeout(existing, seconds(timeout))


def seconds(timeout: float | None) -> float:
    """``timeout`` as the core takes it: None, which leaves it to the team, as a negative number.

    Raises ArgumentError when it is negative or no number.
    """
    if timeout is None:
        return -1.0
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float, np.number)) or not timeout >= 0:
        raise ArgumentError(f"timeout is {timeout!r}; it is a number of seconds, or 0 for no limit")
    return float(timeout)


def finalize_at_exit() -> None:
    """Arranges for ``finalize`` at exit, or, after an uncaught exception, for an end that the other ranks hear of."""
    atexit.register(_at_exit, os.getpid())


def _at_exit(pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child: not its to end
    # The interpreter notes an uncaught exception there. The other ranks would wait for this one in vain.
    error = getattr(sys, "last_value", None)
    if error is not None:
        _dl_comm.abandon(_first_line(translate(error)))
    else:
        _dl_comm.finalize()


def _first_line(error: BaseException) -> str:
    """The kind of an exception and the first line of its text, as at the end of a traceback."""
    lines = "".join(traceback.format_exception_only(type(error), error)).splitlines()
    # A SyntaxError begins with its place, which is indented.
    return next((line for line in lines if not line.startswith(" ")), "")
