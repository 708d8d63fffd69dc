"""SIGUSR1 while a rank starts, and Python stacks in dumps. The start installs the handlers, not the import.

SIGUSR1 requests a dump. It must not end a process that has nothing to dump yet.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import signal
import sys
import threading
from types import FrameType


def handle_early_sigusr1() -> None:
    """Installs a SIGUSR1 handler, unless there is one. The core's handler runs before it."""
    # Python allows only the main thread to set handlers.
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, _early)


def _early(_number: int, _frame: FrameType | None) -> None:
    core = sys.modules.get("dl_comm._dl_comm")
    if core is not None and core.is_up():
        return  # the core writes a dump
    print("dl_comm: SIGUSR1 in init(): there are no calls to dump; stacks:", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(file=2)


@functools.cache
def register_stack_dumper() -> None:
    """Registers faulthandler to write Python's stacks on the core's signal; once.

    It needs no GIL, which a hang may hold.
    """
    from dl_comm import _dl_comm

    number = signal.SIGRTMAX - 9  # available to programs: the C library does not use it
    if signal.getsignal(number) == signal.SIG_DFL:
        file = os.memfd_create("dl_comm stacks")  # stays open until the process exits
        faulthandler.register(number, file=file)
        _dl_comm.stacks_from(number, file)
