"""``--dump JOB``: all ranks of a job that runs write their last calls."""

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
    """Asks the ranks of a job for a dump; what was done, in words.

    ``dl-comm-run`` reaches the ranks on all hosts. Under another launcher those of this host get SIGUSR1: processes
    below it in which dl_comm is up, and no others, which the signal would end.

    Args:
        job: The process of ``dl-comm-run``, of another launcher, or of a rank.

    Raises:
        UsageError: There are no such ranks.
    """
    for pid in descendants(job):
        settings = _settings(pid)
        if settings and (asked := _ask(settings)) is not None:
            return f"asked {asked} rank(s) for a dump; where it is, they say on their standard error"
    found = rank_processes(job)
    if not found:
        raise UsageError(
            f"--dump {job}: no rank of dl_comm runs below process {job} on this host; name the process of dl-comm-run"
            f"{_jobs()}"
        )
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    return f"asked {len(found)} rank(s) of this host for a dump; where it is, they say on their standard error"


def _settings(pid: int) -> dict[str, Any] | None:
    """What ``dl-comm-run`` has config the ranks; its launcher has it in its environment."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # another user's, or gone
        return None
    found = next(
        (value for name, _, value in (each.partition(b"=") for each in variables) if name == b"DL_COMM_RUN_CONFIG"), b""
    )
    with contextlib.suppress(ValueError):
        config = json.loads(base64.urlsafe_b64decode(found))
        return config if isinstance(config, dict) else None
    return None


def _ask(settings: dict[str, Any]) -> int | None:
    """How many ranks the launcher has handed it on to; None: it does not answer."""
    for address in settings["report"]:
        host, _, port = address.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=_ANSWER_S) as launcher:
                launcher.sendall(settings["token"].encode() + b'{"dump": true}\n')
                return int(launcher.recv(64))
        except (OSError, ValueError):  # perhaps at another address
            continue
    return None


def _jobs() -> str:
    """The jobs of this user on this host, for the message."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_text(errors="replace").split("\0")
            mine = folder.stat().st_uid == os.geteuid() and int(folder.name) != os.getpid()
            if mine and any(word.endswith(("/dl-comm-run", "dl_comm.run")) for word in words[:4]):
                found.append(f"\n  {folder.name}: {' '.join(words).strip()}")
    return "; there are" + "".join(sorted(found)) if found else ""
