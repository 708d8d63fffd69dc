"""``--dump JOB``: all ranks of a running job write a dump."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

from dl_comm.run._child import descendants, rank_processes
from dl_comm.run._options import UsageError

_ANSWER_S = 10.0


def dump(job: int) -> str:
    """Requests a dump from the ranks of a job; returns a message for the user.

    ``dl-comm-run`` reaches the ranks on all hosts. Under another launcher, only its descendants on this host that run
    dl_comm get SIGUSR1; the signal would kill other processes.

    Args:
        job: The process of ``dl-comm-run``, of another launcher, or of a rank.

    Raises:
        UsageError: There are no such ranks.
    """
    for pid in descendants(job):
        settings = _settings(pid)
        if settings and (asked := _ask(settings)) is not None:
            return f"requested a dump from {asked} rank(s); they print its folder on standard error"
    found = rank_processes(job)
    if not found:
        raise UsageError(
            f"--dump {job}: no process below {job} on this host runs dl_comm; use the process of dl-comm-run{_jobs()}"
        )
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    return f"requested a dump from {len(found)} rank(s) of this host; they print its folder on standard error"


def _settings(pid: int) -> dict[str, Any] | None:
    """The settings that ``dl-comm-run`` passed in the environment of process ``pid``."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # another user's, or already ended
        return None
    found = next(
        (value for name, _, value in (each.partition(b"=") for each in variables) if name == b"DL_COMM_RUN_CONFIG"), b""
    )
    with contextlib.suppress(ValueError):
        config = json.loads(base64.urlsafe_b64decode(found))
        return config if isinstance(config, dict) else None
    return None


def _ask(settings: dict[str, Any]) -> int | None:
    """The number of ranks that got the request; None: dl-comm-run does not answer."""
    for address in settings["report"]:
        host, _, port = address.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=_ANSWER_S) as launcher:
                launcher.sendall(settings["token"].encode() + b'{"dump": true}\n')
                return int(launcher.recv(64))
        except (OSError, ValueError):  # try the next address
            continue
    return None


def _is_launcher(words: list[str]) -> bool:
    """Whether a command line begins with one of the names of ``dl-comm run``."""
    pairs = zip(words, words[1:], strict=False)
    return any(word.endswith(("/dl-comm-run", "dl_comm.run")) for word in words) or any(
        second == "run" and (first.endswith("/dl-comm") or first == "dl_comm") for first, second in pairs
    )


def _jobs() -> str:
    """This user's jobs on this host, for the error message."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_text(errors="replace").split("\0")
            mine = folder.stat().st_uid == os.geteuid() and int(folder.name) != os.getpid()
            if mine and _is_launcher(words[:4]):
                found.append(f"\n  {folder.name}: {' '.join(words).strip()}")
    return "; running jobs:" + "".join(sorted(found)) if found else ""
