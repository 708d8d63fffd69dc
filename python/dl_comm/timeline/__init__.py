"""The timeline: what every thread of dl_comm did when, one file for each rank, from ``start`` to ``stop``.

``DL_COMM_TIMELINE=FOLDER`` records from ``init`` to ``finalize`` without a change of the script.
``python -m dl_comm.timeline FOLDER -o trace.json`` merges the files of all ranks.
"""

from __future__ import annotations

import os

from dl_comm import _dl_comm

__all__ = ["start", "stop"]


def start(folder: str | os.PathLike[str]) -> None:
    """Starts the file ``rankN.trace.json`` of this rank in ``folder``, which is made when it is not there.

    Where another job has left a file of that name, it goes into a folder of this job in ``folder``.

    Raises:
        CommError: The file cannot be written.
        StateError: A timeline is being recorded, ``init_mpi`` was not called, or ``finalize`` was.

    Local: ranks may record at different times.
    """
    _dl_comm.timeline_start(os.fspath(folder))


def stop() -> None:
    """Ends the file. Nothing happens when none is being written; ``finalize`` does it too."""
    _dl_comm.timeline_stop()
