"""The timeline: the activity of all dl_comm threads from ``start`` to ``stop``, in one file for each rank.

``DL_COMM_TIMELINE=FOLDER`` records from ``init`` to ``finalize`` without a change to the script.
``python -m dl_comm.timeline FOLDER -o trace.json`` merges the files of all ranks.
"""

from __future__ import annotations

import os

from dl_comm import _dl_comm
from dl_comm._base.checks import checked_path

__all__ = ["start", "stop"]


def __dir__() -> list[str]:
    return sorted(__all__)


def start(folder: str | os.PathLike[str]) -> None:
    """Starts the file ``rankN.trace.json`` of this rank in ``folder``, and creates the folder if needed.

    If another job has a file of that name, this job uses a sub-folder.

    Raises:
        ArgumentError: ``folder`` is no path.
        CommError: The file cannot be written.
        StateError: A timeline is being recorded, ``init_mpi`` was not called, or ``finalize`` was.

    Local: ranks may record at different times.
    """
    _dl_comm.timeline_start(checked_path("folder", folder))


def stop() -> None:
    """Ends the file; does nothing without one. ``finalize`` calls it too."""
    _dl_comm.timeline_stop()
