"""Signals: Python's stacks in dumps, and SIGUSR1 before dl_comm is up.

SIGUSR1 asks for a dump, and must not end a process that has nothing to dump yet.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from types import FrameType


def handle_early_sigusr1() -> None:
    """Keeps SIGUSR1 from ending this process, unless somebody has a handler. The core's handler comes before this."""
    # Python lets only the main thread change handlers.
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, _early)


def _early(_number: int, _frame: FrameType | None) -> None:
    core = sys.modules.get("dl_comm._dl_comm")
    if core is not None and core.is_up():
        return  # it writes a dump
    print("dl_comm: SIGUSR1 before init(): there are no calls to dump; the stacks are", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(file=2)


def register_stack_dumper() -> None:
    """Has faulthandler write Python's stacks when the core asks, which needs no GIL: the rank may hang with it."""
    from dl_comm import _dl_comm

    number = signal.SIGRTMAX - 9  # of those that the C library leaves to programs
    if signal.getsignal(number) == signal.SIG_DFL:
        file = os.memfd_create("dl_comm stacks")  # open as long as the process
        faulthandler.register(number, file=file)
        _dl_comm.stacks_from(number, file)
