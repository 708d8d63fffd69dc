"""What dl_comm tells of itself while it runs: its numbers, and the last calls of this rank."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from dl_comm import _dl_comm
from dl_comm._errors import StateError


def stats() -> dict[str, Any]:
    """The numbers of this rank since ``init``: what was averaged and broadcast, and where the time went.

    ``copied_s``, ``waited_s`` (for ranks of this host), ``reduced_s`` and ``network_s`` (waits included)
    are seconds of the team's threads; ``queued_s`` (from submission to start) and ``busy_s`` (from start to end) are
    summed over calls. ``exposed_s`` are the seconds in which callers waited, ``overlap`` is the share of ``busy_s`` in
    which they did not. ``bytes`` are those of the tensors; ``steps`` go through shared memory, ``flags`` are raised
    there, ``messages`` and ``sent_bytes`` go to other hosts.

    Returns:
        ``rank``, ``size``, and ``teams``: by team (-1: broadcasts, barriers and metrics) a dict of these numbers and of
        ``calls`` and ``failed``, how many ended, and how many of them with an error.

    Raises:
        StateError: ``init_mpi`` was not called, or ``finalize`` was.

    Local; may be called from any thread at any time.
    """
    found: dict[str, Any] = json.loads(_dl_comm.stats())
    found["teams"] = {int(team): numbers for team, numbers in found["teams"].items()}
    return found


def topology() -> dict[str, Any]:
    """Where the ranks are, and how each team carries its calls.

    For each team, ``gpu`` is None until it has had a call on tensors in a GPU's memory; then ``path`` is "nccl", "ipc"
    (kernels on memory that the ranks of a host see in each other), "ipc+staged" (the same within each of several
    hosts, and slices through host memory between them), "staged" (through host memory) or "alone" (one rank), ``why``
    tells why it is no better one, ``wait`` who waits for the other ranks ("stream" or "host", of the two with "ipc"),
    ``gpu``, ``gpu_name`` and ``gpu_uuid`` which GPU it is, ``mps`` whether NVIDIA's Multi-Process Service runs, and
    ``device_bytes`` how much of its memory the team has taken, and ``calls_in_chunks`` how many long calls by "ipc"
    went through that memory in chunks, because tensors of a rank are in memory that others cannot open (torch's
    expandable segments, memory pools).

    Returns:
        ``rank``, ``size``, ``hosts``, ``local_rank``, ``local_size``, ``ranks`` (a list: ``rank``, ``host``,
        ``local_rank``, ``pid``) and ``teams`` (by number, -1 for broadcasts, barriers and metrics: ``threads``,
        ``prec_level``, ``gpu``).

    Raises:
        StateError: ``init_mpi`` was not called, or ``finalize`` was.

    Local; may be called from any thread at any time.
    """
    described: dict[str, Any] = json.loads(_dl_comm.describe())
    _dl_comm.rank()  # raises before init
    if described["state"] != "started":
        raise StateError("dl_comm was finalised; its teams are gone")
    kept = ("rank", "size", "hosts", "local_rank", "local_size")
    ranks = [{key: rank[key] for key in ("rank", "host", "local_rank", "pid")} for rank in described["ranks"]]
    teams = {team["id"]: {key: team[key] for key in ("threads", "prec_level", "gpu")} for team in described["teams"]}
    return {**{key: described[key] for key in kept}, "ranks": ranks, "teams": teams}


def dump(folder: str | os.PathLike[str] | None = None) -> Path:
    """Writes the last calls of this rank and what it waits for, as JSON, for ``python -m dl_comm.blame``.

    The same is written by itself when a team fails, when a call has waited for ``DL_COMM_STALL_WARN_S``, and on
    SIGUSR1.

    Args:
        folder: Where; None is what ``DL_COMM_DUMP_DIR`` says, or a folder of the job under that for temporary files.
            The file is ``rankN.json``; a later one takes its place.

    Returns:
        The file.

    Raises:
        CommError: The file cannot be written.
        StateError: ``init_mpi`` was not called, or ``finalize`` was.

    Local; may be called from any thread, also while another one waits in a call.
    """
    return Path(_dl_comm.dump(None if folder is None else os.fspath(folder)))
