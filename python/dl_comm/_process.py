"""The process in its job: initialization, finalization, ranks, teams."""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import os
import socket
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dl_comm import _dl_comm, _excepthook, _signal, _torchrun
from dl_comm._checks import checked_int, checked_team, seconds
from dl_comm._diagnosis import stats
from dl_comm._errors import ArgumentError, StateError, translate
from dl_comm._file_store import guarded
from dl_comm._groups import Group, checked_place, is_routed, unless_world
from dl_comm._network import addresses
from dl_comm._torch_variables import Position, given, hold_port, name_rank

_owners = itertools.count(1)
# Of the threads that call init(), one connects to the store.
_torchrun_lock = threading.RLock()
_master_lock = threading.RLock()
_is_master_known = False
_held_port: socket.socket | None = None
_MASTER_BYTES = 512
CONTROL_TEAM = -1
"""The team of broadcasts, barriers and metrics."""

_COOLDOWN = {None: 0, "after": 1, "last": 2}
_FRAMEWORKS = (None, "numpy", "tensorflow", "keras", "torch")


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
    elif (by_torchrun := _torchrun.here(os.environ)) is None:
        _dl_comm.init_mpi()
    else:
        _start_by_torchrun(*by_torchrun)
    _have_started()


def _prepare_process() -> None:
    """What a start changes in the process. An import changes nothing."""
    _signal.handle_early_sigusr1()
    _signal.register_stack_dumper()
    _excepthook.install()


def _have_started() -> None:
    """After a start: the environment tells who this process is."""
    sync_environment()
    if not _dl_comm.is_helper():
        _name({})


def _name(master: dict[str, str]) -> None:
    """Sets torch's variables of this rank that are missing, and prints a line if there are others of somebody else."""
    here = Position(_dl_comm.rank(), _dl_comm.size(), _dl_comm.local_rank(), _dl_comm.local_size())
    warning = name_rank({**here.variables(), **master})
    # Who asks to be alone knows of the other ranks.
    if warning is not None and not master and os.environ.get("DL_COMM_ALONE", "").strip() != "1":
        print(f"dl_comm: {warning}", file=sys.stderr, flush=True)


def master_of_rank_0(is_alone: bool, others: Sequence[str] = ()) -> tuple[str, str]:
    """On rank 0: where ranks can meet, by the environment or on a free port, which this process keeps.

    Args:
        is_alone: Whether all ranks are on this host.
        others: Names of hosts that must reach it.
    """
    global _held_port
    known = given(os.environ)
    if "MASTER_PORT" not in known:
        _held_port = _held_port or hold_port()
        known["MASTER_PORT"] = str(_held_port.getsockname()[1])
    if "MASTER_ADDR" not in known:
        known["MASTER_ADDR"] = "127.0.0.1" if is_alone else reachable_address(others)
    return known["MASTER_ADDR"], known["MASTER_PORT"]


def reachable_address(others: Sequence[str]) -> str:
    """An address of this host for ``others``."""
    found = addresses(others, os.environ.get("DL_COMM_SOCKET_IFNAME") or None, anywhere=True)
    return next(iter(found), socket.gethostname())


def other_hosts() -> list[str]:
    """The names of the hosts of the other ranks."""
    return sorted({each["host"] for each in json.loads(_dl_comm.describe())["ranks"]} - {socket.gethostname()})


def name_master(address: str, port: str) -> None:
    """Sets MASTER_ADDR and MASTER_PORT if they are missing."""
    global _is_master_known
    _is_master_known = True
    _name({"MASTER_ADDR": address, "MASTER_PORT": port})


def _publish_master() -> None:
    """Sets MASTER_ADDR and MASTER_PORT on all ranks, to those of rank 0. Collective, once in a job."""
    with _master_lock:
        if _is_master_known:
            return
        text = np.zeros(_MASTER_BYTES, np.uint8)
        if _dl_comm.rank() == 0:
            master = " ".join(master_of_rank_0(_dl_comm.hosts() == 1, other_hosts())).encode()
            text[: len(master)] = np.frombuffer(master, np.uint8)
        if _dl_comm.size() > 1:
            _dl_comm.broadcast([text], 0, None, -1.0)
        name_master(*text.tobytes().rstrip(b"\0").decode().split())


def _is_decided() -> bool:
    """Whether this process is a rank, or a helper of one."""
    return _dl_comm.is_helper() or json.loads(_dl_comm.describe())["state"] == "started"


def _start_by_torchrun(rank: int, size: int) -> None:
    with _torchrun_lock:
        if _is_decided():
            _dl_comm.init_mpi()
        else:
            _dl_comm.init_store(_torchrun.store(), rank, size)


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


def init(
    nthread_per_team: int | None = None,
    nteams: int = 1,
    msglen: int = 0,
    framework: str | None = None,
    *,
    pin_gpu: bool = False,
    rank: int | None = None,
    size: int | None = None,
    address: str | None = None,
    key: str | None = None,
) -> None:
    """Starts dl_comm. Collective; all arguments but ``rank`` are the same on all ranks.

    Sets those of torchrun's variables that are missing: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT.

    Args:
        nthread_per_team: Threads per team, at least 1; None: ``DL_COMM_DEFAULT_NTHREADS``, else 2.
        nteams: Teams to create, numbered from 0. Calls on different teams run concurrently.
        msglen: Number of elements per allreduce. A hint; any length works.
        framework: ``"tensorflow"``, ``"keras"`` or ``"torch"`` loads that framework's op library now (and builds it if
            needed) instead of at its first use; None and ``"numpy"`` need none.
        pin_gpu: Assigns one GPU to each rank: local rank modulo GPU count. If ranks share GPUs, rank 0 of the host logs
            it. Call it before anything uses CUDA: the process then sees only that GPU, as GPU 0. (If torch has already
            used CUDA, sets torch's current device instead.) Does nothing without GPUs.
        rank: With ``size``, ``address`` and ``key``: those of ``init_mpi``, if no launcher gives them.
        size: See ``init_mpi``.
        address: See ``init_mpi``.
        key: See ``init_mpi``.

    Raises:
        ArgumentError: An argument is out of range.
        MismatchError: The ranks passed different team settings.
        StateError: ``pin_gpu`` after TensorFlow has used its GPUs.
        TimeoutError: A rank missed the deadline. (If MPI itself waits for it, the process exits with status 1.)
        CommError: MPI, memory or threads are not available, or a rank has invalid settings. All ranks raise it.

    A second call creates missing teams; those that exist keep their threads, and rank 0 prints a line if
    ``nthread_per_team`` asks for others. In a helper of a rank (see ``init_mpi``) it does nothing.
    """
    if framework is not None and (not isinstance(framework, str) or framework not in _FRAMEWORKS):
        raise ArgumentError(f"invalid framework: {framework!r} (expected one of {', '.join(map(repr, _FRAMEWORKS))})")
    threads = 0 if nthread_per_team is None else checked_int("nthread_per_team", nthread_per_team, 1)
    teams = checked_int("nteams", nteams, 1)
    checked_int("msglen", msglen, 0, 2**63)
    is_explicit = (rank, size, address, key) != (None, None, None, None)
    if _dl_comm.is_helper() and not is_explicit:
        return
    init_mpi(rank=rank, size=size, address=address, key=key)
    if pin_gpu:
        from dl_comm._gpus import pin

        pin()
    before = _threads_of_teams() if threads and _dl_comm.is_initialized() else {}
    _dl_comm.init_teams(teams, threads)
    kept = {team: count for team, count in before.items() if 0 <= team < teams and count != threads}
    if kept and _dl_comm.rank() == 0:
        keeps = ", ".join(f"team {team} keeps {count}" for team, count in kept.items())
        print(f"dl_comm: init(nthread_per_team={threads}) holds for new teams: {keeps}", file=sys.stderr, flush=True)
    _publish_master()
    if framework in ("tensorflow", "keras"):
        import dl_comm.tensorflow
    elif framework == "torch":
        import dl_comm.torch  # noqa: F401


def _threads_of_teams() -> dict[int, int]:
    return {team["id"]: team["threads"] for team in json.loads(_dl_comm.describe())["teams"]}


def ensure_initialized() -> None:
    """Calls ``init`` with default arguments if needed, for bindings that work right after the import."""
    if not _dl_comm.is_initialized():
        init()


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
        print(f"dl_comm: trans_alg {transition} of team {team} counts as 1, a smooth transition", file=sys.stderr)


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
    team: int, nteam: int, nthread_per_team: int, nstep: int | None, warmup: float, verb: int, freq: int
) -> None:
    """Creates missing teams for an optimizer on ``team``, and sets the team's schedule if ``nstep`` is given.

    The fraction ``warmup`` of ``nstep`` steps blocks; ``verb`` and ``freq`` are ``verbosity`` and ``perf_freq``.
    """
    init(nthread_per_team, max(nteam, team + 1))
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
    nthread_per_team: int,
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
        start_team(place, nteam, nthread_per_team, nstep, warmup, verb, freq)
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


def finalize() -> None:
    """Ends the teams, and MPI if dl_comm initialized it. Collective; a second call does nothing.

    Waits for the other ranks, up to ``DL_COMM_TIMEOUT_S``, also after a failure: otherwise a launcher could kill them
    when this rank exits. On a timeout, logs a line and changes the exit status from 0 to 1. Runs automatically when the
    interpreter exits.
    """
    from dl_comm._groups import forget_world

    global _is_master_known, _held_port
    forget_world()
    _dl_comm.finalize()
    with _master_lock:
        _is_master_known = False
        if _held_port is not None:
            _held_port.close()
            _held_port = None


def is_initialized() -> bool:
    """Whether ``init`` has succeeded and ``finalize`` was not called yet."""
    return _dl_comm.is_initialized()


def _when_started(number: Callable[[], int]) -> int:
    """A number that a rank knows. Makes this process a rank first if needed."""
    try:
        return number()
    except StateError:
        init_mpi()
    return number()


def get_rank() -> int:
    """The rank of this process, from 0; calls ``init_mpi`` if needed. The plugin's name of ``rank``."""
    return _when_started(_dl_comm.rank)


def get_nranks() -> int:
    """The number of processes; calls ``init_mpi`` if needed. The plugin's name of ``size``."""
    return _when_started(_dl_comm.size)


def get_localrank() -> int:
    """The rank of this process among those of its host, from 0; calls ``init_mpi`` if needed. Also ``local_rank``."""
    return _when_started(_dl_comm.local_rank)


def local_size() -> int:
    """The number of processes on this host; calls ``init_mpi`` if needed."""
    return _when_started(_dl_comm.local_size)


def num_hosts() -> int:
    """The number of hosts: sets of processes that share memory; calls ``init_mpi`` if needed."""
    return _when_started(_dl_comm.hosts)


rank = get_rank
size = get_nranks
local_rank = get_localrank


def barrier(*, timeout: float | None = None, group: Group | None = None) -> None:
    """Returns when every rank has called it. Collective.

    Args:
        group: The ranks that take part; None: all.
        timeout: The deadline in seconds, instead of ``DL_COMM_TIMEOUT_S``; 0: no limit.

    Raises:
        TimeoutError: A rank missed the deadline.
        PeerLostError: A rank has ended.
    """
    if unless_world(group) is None and not is_routed():
        _dl_comm.barrier(seconds(timeout))
        return
    from dl_comm._ops import barrier_in

    barrier_in(group, timeout)


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


@functools.cache
def finalize_at_exit() -> None:
    """Registers an exit handler, once: ``finalize``, or, after an uncaught exception, an abort that ranks detect."""
    atexit.register(at_exit, os.getpid())


def at_exit(pid: int) -> None:
    """Ends the job in the process ``pid`` at its exit."""
    if os.getpid() != pid:
        return  # a forked child must not finalize its parent's job
    # Set after an uncaught exception. Without an abort, the other ranks would wait for this one.
    error = getattr(sys, "last_value", None)
    if error is not None:
        _dl_comm.abort(_first_line(translate(error)))
    else:
        _dl_comm.finalize()


def _first_line(error: BaseException) -> str:
    """The type of an exception and the first line of its text, as at the end of a traceback."""
    lines = "".join(traceback.format_exception_only(type(error), error)).splitlines()
    # The text of a SyntaxError begins with its location, which is indented.
    return next((line for line in lines if not line.startswith(" ")), "")
