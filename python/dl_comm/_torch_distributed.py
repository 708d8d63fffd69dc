"""The backend ``dl_comm`` of ``torch.distributed``: how its process groups are made.

``torch_ops/c10d`` has the backend itself. It works with the torch that it was built for only, because its classes are
not in torch's stable ABI.

Thread rule: as ``torch.distributed``, which makes process groups on one thread.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.constants import default_pg_timeout

from dl_comm import _dl_comm
from dl_comm._base.errors import ArgumentError, CommError, MismatchError, StateError, TimeoutError
from dl_comm._base.torch_variables import given, launched
from dl_comm._job import state
from dl_comm._job.end import at_exit, finalize, finalize_at_exit
from dl_comm._job.rank_variables import master_of_rank_0, name_master, other_hosts, reachable_address
from dl_comm._job.start import ensure_initialized, start_by_store
from dl_comm._libraries.build import abi_of
from dl_comm._libraries.load import check_one_core, ops_library

_KEY = "dl_comm/start"
"""Whether ``init_process_group`` has started dl_comm, by torch's store."""


def create_backend(options: Any, pg_options: Any = None) -> Any:
    """Makes the backend of a process group; torch calls it on the members. Collective over them.

    The default group makes its processes ranks of dl_comm, unless they are already, and then both must agree on ranks
    and size.

    Args:
        options: torch's ``_DistributedBackendOptions``: the store, the ranks, the deadline.
        pg_options: Must be None, or of torch's base class ``Backend.Options``.

    Raises:
        ArgumentError: ``pg_options`` are those of another backend.
        StateError: A part of the processes makes a group before all of them have started dl_comm.
        MismatchError: The processes are ranks of dl_comm with other numbers than torch gives them.
        TimeoutError: A process missed the deadline.
        ImportError: The library cannot be built, or is not for this torch.
    """
    if pg_options is not None and type(pg_options) is not torch._C._distributed_c10d.Backend.Options:
        kind = type(pg_options)
        raise ArgumentError(f"pg_options is a {kind.__module__}.{kind.__qualname__}; the backend dl_comm takes none")
    size = options.group_size
    everyone = dist.get_world_size() if dist.is_initialized() else size
    is_default = not options.global_ranks_in_group
    ranks = list(options.global_ranks_in_group) or list(range(size))
    if is_default:
        if launched(os.environ) is not None:
            _end_with_launcher()
        _end_earlier_job()
    if ranks == list(range(everyone)):
        _start_all(options.store, options.group_rank, size, options.timeout)
    elif not _is_started():
        raise StateError(
            f"a process group of the ranks {ranks} of {everyone} cannot start dl_comm, which needs all ranks: call "
            "dist.init_process_group('dl_comm'), or dl_comm.init_mpi() with the same rank numbers, on every rank before"
        )
    _load_library()
    holder = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
    name = f"process group {options.group_id}"
    torch.ops.dl_comm_c10d.attach(holder.boxed(), ranks, name, _seconds(options.timeout))
    return holder._get_backend(torch.device("cpu"))


@functools.cache
def _end_with_launcher() -> None:
    """Registers an exit handler; before that of the library, which must run first."""
    atexit.register(_leave_launcher, os.getpid())


def _leave_launcher(pid: int) -> None:
    """Ends together where the launcher has started MPI: it kills the other ranks when one ends that has not left it."""
    if os.getpid() == pid and _is_started() and _dl_comm.hosts() > 1:
        at_exit(pid)


def _seconds(timeout: timedelta) -> float:
    """The deadline of a group's calls; 0 for ``DL_COMM_TIMEOUT_S``, if it is set and the script has chosen nothing."""
    if timeout == default_pg_timeout and os.environ.get("DL_COMM_TIMEOUT_S"):
        return 0.0
    return timeout.total_seconds()


@functools.cache
def _load_library() -> None:
    path = ops_library("torch.distributed")
    torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    ops = torch.ops.dl_comm_c10d
    built_for = ops.torch_version()
    abi, abi_here = (abi_of("torch.distributed", f"torch-{version}") for version in (built_for, torch.__version__))
    if torch.__version__ != built_for and (abi is None or abi != abi_here):
        raise ImportError(
            f"{path} was built for torch {built_for}, but this is torch {torch.__version__}: run "
            "'python -m dl_comm.build --force'"
        )
    check_one_core(path, ops.core_id())
    # Runs before dl_comm's own exit handler, which ends the calls in flight.
    atexit.register(_close_pool, os.getpid())
    backend_class: Any = torch._C._distributed_c10d.Backend
    if not hasattr(backend_class, "perform_nocolor_split"):
        # torch calls it on the processes outside of a group that is split off; only the members of a group make it.
        backend_class.perform_nocolor_split = _do_nothing


def _close_pool(pid: int) -> None:
    if os.getpid() == pid:  # a forked child has none of the threads
        torch.ops.dl_comm_c10d.close_pool()


def _do_nothing(_backend: Any, _device: Any) -> None:
    pass


def _end_earlier_job() -> None:
    """Ends the job of an earlier default group, which may have had other ranks. Not one that the script has started."""
    if state.current.is_of_torch and _is_started() and not _dl_comm.is_initialized() and _dl_comm.hosts() == 1:
        finalize()


def _start_all(store: Any, rank: int, size: int, timeout: timedelta) -> None:
    """Makes the processes ranks of dl_comm by torch's store, or checks that they are. Collective."""
    jobs = _gather_json(store, rank, size, _describe_process(), timeout)
    errors = [f"rank {each}: {job['error']}" for each, job in enumerate(jobs) if "error" in job]
    if errors:
        raise ImportError("the backend dl_comm is not available: " + "; ".join(errors))
    if any(job["job"] for job in jobs):
        _check_same_job(jobs)
    else:
        start_by_store(store, rank, size)
        state.current.is_of_torch = True
        _name_master(store, rank, timeout)


def _name_master(store: Any, rank: int, timeout: timedelta) -> None:
    """Sets MASTER_ADDR and MASTER_PORT if they are missing, the same on all ranks. Collective."""
    key = f"{_KEY}/master"
    if rank == 0:
        is_alone = _dl_comm.hosts() == 1
        store.set(key, " ".join(master_of_rank_0(is_alone, [] if is_alone else other_hosts())))
    store.wait([key], timeout)
    name_master(*store.get(key).decode().split())
    # A later process group may use the same store.
    if store.add(f"{key}/readers", 1) == _dl_comm.size():
        for each in (key, f"{key}/readers"):
            store.delete_key(each)


def _describe_process() -> dict[str, Any]:
    """This process in its job of dl_comm, if there is one, or the error of loading the library."""
    try:
        _load_library()
    except (ImportError, OSError) as error:
        return {"error": str(error)}
    if not _is_started():
        return {"job": None}
    first = json.loads(_dl_comm.describe())["ranks"][0]
    job = [first["host"], first["pid"], first["pid_namespace"], first["boot_id"]]
    return {"job": job, "rank": _dl_comm.rank(), "size": _dl_comm.size()}


def _is_started() -> bool:
    return bool(json.loads(_dl_comm.describe())["state"] == "started")


def _check_same_job(jobs: list[dict[str, Any]]) -> None:
    for rank, job in enumerate(jobs):
        if job["job"] is None:
            found = "has not started dl_comm, and others have"
        elif job["size"] != len(jobs) or job["rank"] != rank:
            found = f"is rank {job['rank']} of {job['size']} of dl_comm"
        elif job["job"] != jobs[0]["job"]:
            found = "is in another job of dl_comm than rank 0"
        else:
            continue
        raise MismatchError(
            f"torch.distributed's rank {rank} of {len(jobs)} {found}: torch and dl_comm need the same ranks in the "
            "same order; call init_process_group before dl_comm.init(), or give it the ranks of dl_comm"
        )


def _gather_json(store: Any, rank: int, size: int, value: Any, timeout: timedelta) -> list[Any]:
    """The values of all ranks. Rank 0 collects them, so that the store gets few requests. No keys remain.

    All ranks must make a further collective step before any of them calls this again.
    """
    everyone, readers = f"{_KEY}/all", f"{_KEY}/readers"
    every = [f"{_KEY}/{each}" for each in range(size)]
    store.set(every[rank], json.dumps(value))
    if rank == 0:
        _wait(store, every, timeout)
        store.set(everyone, json.dumps([json.loads(store.get(each)) for each in every]))
    else:
        _wait(store, [everyone], timeout, every)
    values = list(json.loads(store.get(everyone)))
    if store.add(readers, 1) == size:
        # A later process group may use the same store, and must not find them.
        for key in (*every, everyone, readers):
            store.delete_key(key)
    return values


def _wait(store: Any, keys: list[str], timeout: timedelta, every: list[str] | None = None) -> None:
    try:
        store.wait(keys, timeout)
    except Exception as error:  # the stores of torch raise RuntimeError, DistStoreError or DistNetworkError
        missing = [each.rsplit("/", 1)[1] for each in every or keys if not _has(store, each)]
        if not missing:
            raise CommError(f"init_process_group: {error}") from error
        limit = f"{timeout.total_seconds():g} s"
        raise TimeoutError(
            f"init_process_group: rank(s) {', '.join(missing)} did not join within {limit}: {error}"
        ) from error


def _has(store: Any, key: str) -> bool:
    return bool(store.check([key]))


def rendezvous_of_ranks(
    timeout: timedelta = default_pg_timeout, **_options: Any
) -> Iterator[tuple[Any, int, int]] | None:
    """The rendezvous of ``init_process_group`` where torch's variables are missing; None where they are set.

    The processes become ranks as in ``dl_comm.init``, and meet in a TCP store, whose address dl_comm tells to all.
    """
    known = given(os.environ)
    return None if {"RANK", "WORLD_SIZE"} & set(known) else _rendezvous(timeout)


def _rendezvous(timeout: timedelta) -> Iterator[tuple[Any, int, int]]:
    """Yields the store, the rank and the size, as torch's rendezvous handlers do. Collective."""
    from dl_comm._arrays.objects import broadcast_object

    # Launchers kill the other ranks when one ends that has not left MPI, which it does with them.
    finalize_at_exit()
    ensure_initialized()
    rank, size = _dl_comm.rank(), _dl_comm.size()
    store = None
    address: Any = None
    if rank == 0:
        host = "127.0.0.1" if _dl_comm.hosts() == 1 else reachable_address(other_hosts())
        store = TCPStore(host, 0, size, True, timeout, wait_for_workers=False)
        address = (host, store.port)
    host, port = broadcast_object(address, 0)
    if store is None:
        store = TCPStore(host, port, size, False, timeout, wait_for_workers=False)
    yield store, rank, size
    raise StateError("this rendezvous cannot be repeated: call init_process_group again")
