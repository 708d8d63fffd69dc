"""Introspection at run time: statistics, topology, and the last calls of this rank."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from dl_comm import _dl_comm
from dl_comm._base.checks import checked_path
from dl_comm._base.errors import StateError


def stats() -> dict[str, Any]:
    """Statistics of this rank since ``init``: calls, bytes and times of each team and group.

    Seconds of the team's threads: ``copied_s``, ``waited_s`` (for ranks of this host), ``reduced_s`` and ``network_s``
    (with waits). Sums over calls: ``queued_s`` (from submission to start) and ``comm_s`` (from start to end).
    ``exposed_s``: seconds that callers waited; ``overlap``: the fraction of ``comm_s`` in which they did not.
    ``bytes``: size of the tensors; ``shm_rounds``: rounds through shared memory; ``shm_flags``: flags raised there;
    ``messages`` and ``sent_bytes``: traffic to other hosts.

    Returns:
        ``rank``, ``size``, and ``teams``: for each team (-1: broadcasts, barriers and metrics) a dict of these numbers,
        with ``calls`` (completed calls) and ``failed`` (those with an error). ``groups``: the same without
        ``exposed_s`` and ``overlap`` for each other group that exists, with its ``name`` and ``members``. A parameter
        server is a group, and what this rank sends to it or receives from it is a call.

    Raises:
        StateError: ``init_mpi`` was not called, or ``finalize`` was.

    Local; any thread may call it at any time.
    """
    found: dict[str, Any] = json.loads(_dl_comm.stats())
    found["teams"] = {int(team): numbers for team, numbers in found["teams"].items()}
    return found


def topology() -> dict[str, Any]:
    """What made this process a rank, the hosts of the ranks, and the GPU path of each team.

    ``launcher`` is "mpiexec" (any launcher that starts MPI), "torchrun", "kubernetes", "variables" (``DL_COMM_RANK``),
    "arguments" (those of ``init``), "store" (of the program, such as that of ``init_process_group``), or "none".

    For each team, ``gpu`` is None before its first call with GPU tensors, then a dict:

    - ``path``: "nccl"; "ipc" (kernels on memory that the ranks of a host share); "ipc+staged" ("ipc" within each host,
      and shards through host memory between hosts); "staged" (through host memory); or "single_rank";
    - ``reason``: the reason why no faster path is used;
    - ``sync``: "stream" or "host", whichever waits for the other ranks (with "ipc" and "ipc+staged");
    - ``gpu``, ``gpu_name``, ``gpu_uuid``: the GPU; ``mps``: whether NVIDIA's Multi-Process Service runs;
    - ``advice``: what to do about ranks that share a GPU without it, or None; ``staged_below``: calls of fewer bytes
      are then "staged", if the path is not demanded;
    - ``device_bytes``: GPU memory that the team has allocated;
    - ``calls_in_chunks``: long calls by "ipc" that copied chunks through this memory, because other ranks cannot open a
      rank's tensors (torch's expandable segments, memory pools).

    Returns:
        ``launcher``, ``rank``, ``size``, ``hosts``, ``local_rank``, ``local_size``, ``ranks`` (a list: ``rank``,
        ``host``, ``local_rank``, ``pid``) and ``teams`` (by number, -1 for broadcasts, barriers and metrics:
        ``threads``, ``prec_level``, ``gpu``).

    Raises:
        StateError: ``init_mpi`` was not called, or ``finalize`` was.

    Local; any thread may call it at any time.
    """
    described: dict[str, Any] = json.loads(_dl_comm.describe())
    _dl_comm.rank()  # raises before init
    if described["state"] != "started":
        raise StateError("dl_comm is finalized and has no teams")
    kept = ("launcher", "rank", "size", "hosts", "local_rank", "local_size")
    ranks = [{key: rank[key] for key in ("rank", "host", "local_rank", "pid")} for rank in described["ranks"]]
    teams = {team["id"]: {key: team[key] for key in ("threads", "prec_level", "gpu")} for team in described["teams"]}
    return {**{key: described[key] for key in kept}, "ranks": ranks, "teams": teams}


def dump(folder: str | os.PathLike[str] | None = None) -> Path:
    """Writes the last calls and the current wait of this rank, as JSON, for ``python -m dl_comm.analyze_dumps``.

    dl_comm also writes this file when a team fails, when a call has waited for ``DL_COMM_STALL_WARN_S``, and on
    SIGUSR1.

    Args:
        folder: The folder; None: ``DL_COMM_DUMP_DIR``, else a folder of the job in the folder for temporary files. The
            file is ``rankN.json``; a later dump replaces it.

    Returns:
        The path of the file.

    Raises:
        ArgumentError: ``folder`` is no path.
        CommError: The file cannot be written.
        StateError: ``init_mpi`` was not called, or ``finalize`` was.

    Local; any thread may call it, also while another thread waits in a call.
    """
    return Path(_dl_comm.dump(None if folder is None else checked_path("folder", folder)))
