"""The end of the job: ``finalize``, and the exit of the process.

Thread rule: any thread; collective.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import traceback

from dl_comm import _dl_comm
from dl_comm._base import rc
from dl_comm._base.errors import translate
from dl_comm._job import state


def finalize() -> None:
    """Ends the job: its groups, teams and threads. Collective; a second call does nothing.

    Waits for the other ranks, up to ``DL_COMM_TIMEOUT_S``, also after a failure: otherwise a launcher could kill them
    when this rank exits. On a timeout, logs a line and changes the exit status from 0 to 1. Runs automatically when the
    interpreter exits, unless ``rc.exit_handler`` is False.

    Raises the error of a call that was lost on a GPU (see ``synchronize``) if no call has raised since. The job has
    ended then, too, and the exit status is not 0.

    Afterwards ``init`` starts a new job, also under mpiexec and srun: MPI, if dl_comm initialized it, ends when the
    process exits. A process that exits then waits until the others do. Groups and handles of the old job raise errors.
    """
    state.end()
    _dl_comm.finalize()


@functools.cache
def finalize_at_exit() -> None:
    """Registers an exit handler, once: ``finalize``, or, after an uncaught exception, an abort that ranks detect."""
    atexit.register(at_exit, os.getpid())


def at_exit(pid: int) -> None:
    """Ends the job in the process ``pid`` at its exit."""
    # A forked child must not finalize its parent's job.
    if os.getpid() != pid:
        return
    try:
        if rc.rc.exit_handler:
            _end_job()
    finally:
        _dl_comm.end_log()


def _end_job() -> None:
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
