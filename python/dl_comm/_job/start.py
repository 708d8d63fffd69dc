"""The start of the ranks: by a launcher, torchrun, arguments, or a store.

Thread rule: any thread; collective functions in the same order on all ranks.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from typing import Any

from dl_comm import _dl_comm
from dl_comm._base import excepthook, log, rc, signals
from dl_comm._base.checks import checked_int, checked_threads
from dl_comm._base.errors import ArgumentError, StateError
from dl_comm._base.file_store import guarded
from dl_comm._job import torchrun
from dl_comm._job.end import finalize_at_exit
from dl_comm._job.rank_variables import name_this_rank, publish_master

# Of the threads that call init(), one connects to the store.
_torchrun_lock = threading.RLock()


def init_mpi(
    *, rank: int | None = None, size: int | None = None, address: str | None = None, key: str | None = None
) -> None:
    """Makes this process a rank. Afterwards ranks and sizes are known. ``init`` calls it if needed. Collective.

    Without arguments, the first of these decides: torchrun, by the store of its agent, for which torch is imported; a
    launcher that starts MPI (mpiexec, srun, PALS), or a library that has initialized MPI, such as mpi4py;
    ``DL_COMM_RANK``, ``DL_COMM_SIZE`` and ``DL_COMM_ADDR``; an indexed job of Kubernetes with the last two; else the
    process is rank 0 of 1. A launcher that starts MPI inside of a rank of torchrun comes first. ``docs/run.md`` has
    examples. ``topology()["launcher"]`` names it.

    With ``rank`` and ``size``, the program sets the rank, for example under Ray. A process that a rank has started then
    becomes a rank of another job.

    Args:
        rank: The rank of this process, from 0.
        size: The number of processes.
        address: ``host:port``, on which rank 0 listens; not needed for one process.
        key: A secret of all ranks; None: ``DL_COMM_JOB_KEY``. Needed if other hosts can reach the address.

    Without arguments it does nothing in a process that a rank has started or forked, such as a data loader worker. Such
    a process is a helper of the rank: it knows the rank's numbers, and communication in it raises StateError. Programs
    that this process starts do not inherit the launcher's variables (such as ``PMI_RANK``); see ``DL_COMM_ALONE`` in
    ``docs/environment.md``. Sets those of RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE that are missing.

    Raises:
        ArgumentError: An argument is invalid, or only some are given.
        CommError: MPI initialization failed, or the launcher is not usable: each process would train alone.
        StateError: Called with a rank in a process that is another rank, or was forked from one.
        TimeoutError: A rank missed the deadline of ``DL_COMM_TIMEOUT_S``.
    """
    _prepare_process()
    if (rank, size, address, key) != (None, None, None, None):
        _start_by_arguments(rank, size, address, key)
    elif (by_torchrun := torchrun.here(os.environ)) is None:
        _dl_comm.init_mpi()
    else:
        _start_by_torchrun(*by_torchrun)
    _have_started()


def _prepare_process() -> None:
    """What a start changes in the process, by ``dl_comm.rc``. An import changes nothing."""
    settings = rc.use()
    _dl_comm.dump_on_signal(settings.signal_dump)
    if settings.signal_dump:
        signals.handle_early_sigusr1()
    if settings.stack_dump:
        signals.register_stack_dumper()
    if settings.excepthook:
        excepthook.install()
    if log.is_routed():
        _dl_comm.log_to(log.warn)
    finalize_at_exit()


def _have_started() -> None:
    """After a start: the environment tells who this process is."""
    sync_environment()
    if not _dl_comm.is_helper():
        name_this_rank({})


def _is_decided() -> bool:
    """Whether this process is a rank, or a helper of one."""
    return _dl_comm.is_helper() or json.loads(_dl_comm.describe())["state"] == "started"


def _start_by_torchrun(rank: int, size: int) -> None:
    with _torchrun_lock:
        if _is_decided():
            _dl_comm.init_mpi()
        else:
            _dl_comm.init_store(torchrun.store(), rank, size)


def _start_by_arguments(rank: int | None, size: int | None, address: str | None, key: str | None) -> None:
    if rank is None or size is None:
        raise ArgumentError(f"rank={rank}, size={size}: address and key need both of them")
    numbers = checked_int("rank", rank, 0), checked_int("size", size, 1)
    if address is None and numbers[1] > 1:
        raise ArgumentError("address is None (expected host:port, on which rank 0 listens)")
    for name, text in (("address", address), ("key", key)):
        if text is not None and (not isinstance(text, str) or "\0" in text):
            raise ArgumentError(f"invalid {name}: {type(text).__name__} (expected text)")
    if _dl_comm.is_up() and json.loads(_dl_comm.describe())["state"] == "started":
        here = _dl_comm.rank(), _dl_comm.size()
        if here != numbers:
            raise StateError(f"this process is rank {here[0]} of {here[1]} already; call finalize() first")
        return
    secret = os.environ.get("DL_COMM_JOB_KEY", "") if key is None else key
    _dl_comm.init_address(address or "127.0.0.1:1", *numbers, secret)


def start_by_store(store: Any, rank: int, size: int) -> None:
    """Makes this process rank ``rank`` of ``size`` by a store that all ranks share, without a launcher. Collective.

    A process that a rank has started, but not forked, becomes a rank of another job. After ``finalize``, a process may
    start again, as another rank too.

    Args:
        store: An object with ``set(key, value)``, ``get(key)``, ``check(keys)``, ``add(key, amount)`` and
            ``delete_key(key)`` as those of ``torch.distributed.Store``, whose methods any thread may call. Keys begin
            with ``dl_comm/``. Used until ``finalize``.
        rank: The rank of this process, from 0.
        size: The number of processes.

    Raises:
        ArgumentError: The rank is out of range, the store lacks a method, or the ranks disagree about the size.
        CommError: A method of the store has raised an exception; the message has its text.
        StateError: This process is a rank already, or was forked from one.
        TimeoutError: A rank missed the deadline of ``DL_COMM_TIMEOUT_S``.
    """
    _prepare_process()
    _dl_comm.init_store(guarded(store), checked_int("rank", rank, 0), checked_int("size", size, 1))
    _have_started()


def sync_environment() -> None:
    """Copies the core's changes of the environment to ``os.environ``, which Python passes to children."""
    now = _dl_comm.environment()
    for name in [name for name in os.environb if name not in now]:
        del os.environb[name]
    helper_mark = b"DL_COMM_HELPER_OF"
    if helper_mark in now:
        os.environb[helper_mark] = now[helper_mark]


def start(
    threads: int | None = None, nteams: int = 1, prepare: Callable[[], object] = lambda: None, **numbers: Any
) -> bool:
    """Makes this process a rank and creates the missing teams, as ``init``; False in a helper. Collective.

    Args:
        threads: As for ``init``.
        nteams: As for ``init``.
        prepare: Called between the two, on a rank.
        **numbers: ``rank``, ``size``, ``address`` and ``key`` of ``init_mpi``.
    """
    threads, teams = checked_threads(threads, None) or 0, checked_int("nteams", nteams, 1)
    if _dl_comm.is_helper() and all(number is None for number in numbers.values()):
        return False
    init_mpi(**numbers)
    prepare()
    before = _threads_of_teams() if threads and _dl_comm.is_initialized() else {}
    _dl_comm.init_teams(teams, threads)
    kept = {team: count for team, count in before.items() if 0 <= team < teams and count != threads}
    if kept and _dl_comm.rank() == 0:
        keeps = ", ".join(f"team {team} keeps {count}" for team, count in kept.items())
        log.warn(f"init(threads={threads}) holds for new teams: {keeps}")
    publish_master()
    return True


def _threads_of_teams() -> dict[int, int]:
    return {team["id"]: team["threads"] for team in json.loads(_dl_comm.describe())["teams"]}


def ensure_initialized() -> None:
    """Calls ``init`` with default arguments if needed, for bindings that work right after the import.

    Raises StateError after ``finalize``: only ``init`` starts again, because the ranks must do it together.
    """
    if not _dl_comm.is_initialized():
        if json.loads(_dl_comm.describe())["state"] == "finalized":
            raise StateError("dl_comm was finalized; init() starts it again")
        start()
