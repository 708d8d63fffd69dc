"""Starts the launcher, waits for it, forwards signals to it, and reports how the job ended. Main thread only.

The launcher stays in this process's group, so that it gets a terminal's signals and may read the terminal. When this
process ends for any reason, the launcher gets SIGTERM and stops its ranks.
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
from dl_comm.run._hang import hang
from dl_comm.run._listener import Listener
from dl_comm.run._options import UsageError
from dl_comm.run._report import Outcome, outcome

CHILD = Path(__file__).with_name("_child.py")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SI_KERNEL = 0x80  # asm-generic/siginfo.h: sent by the kernel for a terminal key
_FORWARDED = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
_OUTPUT_S = 2.0
_STOPPING = _FORWARDED - {signal.SIGUSR1, signal.SIGUSR2}


def wrapped(command: Sequence[str]) -> list[str]:
    """The command line that runs ``command`` as a rank."""
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
        addresses: This host's addresses to listen on, reachable by the ranks.
        size: The number of ranks, if known.
        grace: Seconds from a rank's failure until the others are stopped; 0: never.

    Raises:
        UsageError: The launcher cannot be started.
    """
    try:
        listener = Listener(addresses)
    except OSError as error:
        raise UsageError(f"cannot listen on {', '.join(addresses)}: {error.strerror}") from error
    job = {**settings, "report": listener.addresses, "token": listener.token, "size": size or 0}
    text = base64.urlsafe_b64encode(json.dumps(job).encode()).decode()
    # The banner filter reads the output of every launcher.
    out, to_launcher = os.pipe()
    try:
        process = _start(command, {**env, "DL_COMM_RUN_CONFIG": text}, to_launcher)
    except OSError as error:
        raise UsageError(f"cannot start {command[0]}: {error.strerror}") from error
    finally:
        os.close(to_launcher)
    started = time.time()
    asked: list[int] = []
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    done = threading.Event()
    # Threads inherit the blocked signals; only the forwarder waits for them.
    output = threading.Thread(target=copy_without_banner, args=(out, 1), daemon=True)
    output.start()
    forwarder = threading.Thread(target=_forward, args=(process, asked, done), daemon=True)
    forwarder.start()
    listener.start()
    code = _wait(process, listener, grace)
    listener.close()
    done.set()
    forwarder.join()
    # A process that outlives the launcher may still hold the pipe.
    output.join(_OUTPUT_S)
    folders = listener.dumps | {env["DL_COMM_DUMP_DIR"]} if env.get("DL_COMM_DUMP_DIR") else listener.dumps
    verdict = hang(listener.ranks, [Path(folder) for folder in sorted(folders)], started)
    return outcome(listener.ranks, size, Path(command[0]).name, code, asked[0] if asked else None, verdict)


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
    """Waits for the launcher, and stops it after ``grace`` seconds if a rank failed.

    Not every launcher stops the other ranks: MPICH's does not if the failed rank had left MPI before.
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
    """Forwards signals sent to this process; the launcher already got those of a terminal."""
    while not done.is_set():
        received = signal.sigtimedwait(_FORWARDED, 0.2)
        if received is None:
            continue
        if received.si_signo in _STOPPING:
            asked.append(received.si_signo)
        if received.si_code != _SI_KERNEL and process.poll() is None:
            process.send_signal(received.si_signo)
