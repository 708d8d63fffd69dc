"""What dl_comm tells of itself while it runs: its numbers, and the last calls of this rank."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from dl_comm import _dl_comm


def stats() -> dict[str, Any]:
    """The numbers of this rank since ``init``: what was averaged and broadcast, and where the time went.

    Returns:
        ``rank``, ``size``, and ``teams``: for each team by its number (-1: broadcasts, barriers and metrics) a dict of

        - ``calls``, ``failed`` (of these), ``bytes`` (of their tensors);
        - ``queued_s``: seconds between submission and start; ``busy_s``: from start to end, both summed over calls;
        - ``copied_s``, ``waited_s`` (for ranks of this host), ``reduced_s``, ``network_s`` (with the waits for other
          hosts): the seconds of the team's threads;
        - ``exposed_s``: seconds in which callers waited; ``overlap``: the share of ``busy_s`` that they did not;
        - ``steps`` through shared memory, ``flags`` raised, ``messages`` and ``sent_bytes`` to other hosts.

    Raises:
        StateError: ``init_mpi`` was not called, or ``finalize`` was.

    Local; may be called from any thread at any time.
    """
    found: dict[str, Any] = json.loads(_dl_comm.stats())
    found["teams"] = {int(team): numbers for team, numbers in found["teams"].items()}
    return found


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
