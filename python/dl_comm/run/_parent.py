"""``--parent PID FOLDER``: ``dl_comm.run(function)`` has started this launcher. Main thread.

The launcher ends with that process, and writes its report to the folder instead of standard error.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
from pathlib import Path

from dl_comm.run._files import REPORT, write
from dl_comm.run._report import Outcome, why

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with(parent: int) -> None:
    """This process gets SIGTERM when ``parent`` ends, or now if it has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def report(parent: int, folder: Path, found: Outcome) -> None:
    """Writes how the job ended; removes the folder if nobody can read it any more."""
    if os.getppid() != parent:
        shutil.rmtree(folder, ignore_errors=True)
        return
    first = None
    if found.first is not None:
        number = int((found.first.end or {}).get("signal") or 0)
        first = {"rank": found.first.rank, "why": why(found.first), "signal": number}
    write(folder / REPORT, json.dumps({"status": found.status, "text": found.text, "first": first}).encode())
