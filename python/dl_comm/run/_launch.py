"""Starts the launcher, waits for it, hands signals on to it, and says how the job ended. Main thread only.

The launcher stays in this process's group, so that a terminal's keys reach it and it may read the terminal. It gets
SIGTERM when this process ends, however that comes, and then stops its ranks.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dl_comm.run._banner import copy_without_banner
from dl_comm.run._listener import Listener
from dl_comm.run._options import UsageError
from dl_comm.run._report import Outcome, outcome

CHILD = Path(__file__).with_name("_child.py")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SI_KERNEL = 0x80  # asm-generic/siginfo.h: the kernel sent it, for a terminal's key
_FORWARDED = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
_OUTPUT_S = 2.0
_STOPPING = _FORWARDED - {signal.SIGUSR1, signal.SIGUSR2}


def wrapped(command: Sequence[str]) -> list[str]:
    """The command that run ``command`` as a rank."""
    return [sys.executable, "-I", "-S", str(CHILD), *command]


def run(
    command: Sequence[str],
    env: dict[str, str],
    settings: dict[str, Any],
    addresses: Sequence[str],
    size: int | None,
    grace: float,
) -> Outcome:
    """Runs the launcher to its end.

    Args:
        command: Its command line.
        env: Its environment.
        settings: For the ranks: ``show``, ``output_dir``, ``bound``, ``local``.
        addresses: Where ranks reach this host; the others of this host's are not listened on.
        size: The number of ranks, if known.
        grace: How many seconds after a rank has failed the others are stopped; 0: that is left to the launcher.

    Raises:
        UsageError: The launcher cannot be started.
    """
    try:
        listener = Listener(addresses)
    except OSError as error:
        raise UsageError(f"cannot listen on {', '.join(addresses)}: {error.strerror}") from error
    job = {**settings, "report": listener.addresses, "token": listener.token, "size": size or 0}
    text = base64.urlsafe_b64encode(json.dumps(job).encode()).decode()
    # What only some launchers print there is looked for in what all print.
    out, to_launcher = os.pipe()
    try:
        process = _start(command, {**env, "DL_COMM_RUN_CONFIG": text}, to_launcher)
    except OSError as error:
        raise UsageError(f"cannot start {command[0]}: {error.strerror}") from error
    finally:
        os.close(to_launcher)
    asked: list[int] = []
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    done = threading.Event()
    # Threads that are started now leave the signals to the one that waits for them.
    output = threading.Thread(target=copy_without_banner, args=(out, 1), daemon=True)
    output.start()
    forwarder = threading.Thread(target=_forward, args=(process, asked, done), daemon=True)
    forwarder.start()
    listener.start()
    code = _wait(process, listener, grace)
    listener.close()
    done.set()
    forwarder.join()
    # Until its end, unless somebody who outlives the launcher has it.
    output.join(_OUTPUT_S)
    return outcome(listener.ranks, size, Path(command[0]).name, code, asked[0] if asked else None)


def _start(command: Sequence[str], env: dict[str, str], out: int) -> subprocess.Popen[bytes]:
    libc = ctypes.CDLL(None)
    parent = os.getpid()

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    sys.stdout.flush()
    return subprocess.Popen(command, env=env, stdout=out, preexec_fn=prepare)


def _wait(process: subprocess.Popen[bytes], listener: Listener, grace: float) -> int:
    """Waits for the launcher.

    Not every launcher stops the others when a rank has failed: MPICH's does not where the rank has left MPI before.
    """
    steps = [process.terminate, process.kill]
    while True:
        try:
            return process.wait(0.2)
        except subprocess.TimeoutExpired:
            since = listener.failed_at
        waits = grace * (3 - len(steps))
        if grace and steps and since is not None and time.monotonic() > since + waits:
            steps.pop(0)()


def _forward(process: subprocess.Popen[bytes], asked: list[int], done: threading.Event) -> None:
    """Hands on the signals that were sent to this process; a terminal's have reached the launcher already."""
    while not done.is_set():
        came = signal.sigtimedwait(_FORWARDED, 0.2)
        if came is None:
            continue
        if came.si_signo in _STOPPING:
            asked.append(came.si_signo)
        if came.si_code != _SI_KERNEL and process.poll() is None:
            process.send_signal(came.si_signo)
