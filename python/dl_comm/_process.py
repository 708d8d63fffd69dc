"""The process in its job: start, end, ranks, teams."""

from __future__ import annotations

import atexit
import operator
import os
import sys
from typing import Any

from dl_comm import _dl_comm
from dl_comm._errors import ArgumentError

_FRAMEWORKS = (None, "numpy", "tensorflow", "keras", "torch")


def init_mpi() -> None:
    """Brings MPI up, or adopts an MPI that mpi4py or another library has brought up. Collective.

    Afterwards ranks and sizes are known; ``init`` does it where it was not done.
    """
    _dl_comm.init_mpi()


def init(nthread_per_team: int = 2, nteams: int = 1, msglen: int = 0, framework: str | None = None) -> None:
    """Starts dl_comm. Collective, with the same arguments on all ranks.

    Args:
        nthread_per_team: Threads of each team that carry its averages, from 1.
        nteams: Teams to create, numbered from 0. Reductions of different teams run side by side.
        msglen: Number of elements that will be averaged together. A hint; any length works.
        framework: ``"tensorflow"``, ``"keras"`` or ``"torch"`` loads that framework's operations now (and builds them
            where that was not done) instead of at their first use; None and ``"numpy"`` need none.

    Raises:
        ArgumentError: An argument is out of range.
        CommError: MPI, memory or threads are not to be had.

    Calling it again creates the teams that are missing.
    """
    if framework not in _FRAMEWORKS:
        raise ArgumentError(f"framework is {framework!r}; it is one of {', '.join(map(repr, _FRAMEWORKS))}")
    threads = _whole("nthread_per_team", nthread_per_team, 1)
    teams = _whole("nteams", nteams, 1)
    _whole("msglen", msglen, 0)
    _dl_comm.init()
    for team in range(teams):
        _dl_comm.ensure_team(team, threads)
    if framework in ("tensorflow", "keras"):
        import dl_comm.tensorflow
    elif framework == "torch":
        import dl_comm.torch  # noqa: F401


def _whole(name: str, value: Any, least: int) -> int:
    """``value`` as an int; NumPy's integers and the like, which scripts compute, count too."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ArgumentError(f"{name} is {value!r}; it is a whole number from {least}")
    return number


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
    _dl_comm.create_team(team, nthreads, prec_level)


def finalize() -> None:
    """Ends the teams, and MPI where dl_comm brought it up. Collective; calling it again does nothing.

    Runs by itself at the end of the interpreter.
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


def hosts() -> int:
    """The number of hosts: sets of processes that share memory. Valid after ``init_mpi``."""
    return _dl_comm.hosts()


rank = get_rank
size = get_nranks
local_rank = get_localrank


def barrier() -> None:
    """Returns when every rank has called it. Collective."""
    _dl_comm.barrier()


def finalize_at_exit() -> None:
    """Arranges for ``finalize`` at exit, or, after an uncaught exception, for an end that the other ranks hear of."""
    atexit.register(_at_exit, os.getpid())


def _at_exit(pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child: not its to end
    # The interpreter notes an uncaught exception there. The other ranks would wait for this one in vain.
    if getattr(sys, "last_value", None) is not None:
        _dl_comm.abandon()
    else:
        _dl_comm.finalize()
