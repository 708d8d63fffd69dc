"""Checks in ``/proc`` whether the processes of a job's ranks on this host still run."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path

from dl_comm.analyze_dumps._dumps import JobDumps, RankInfo


def states(job: JobDumps) -> dict[int, str]:
    """``has ended`` or ``is stopped`` by rank, for the ranks of this host; running ranks are omitted.

    The result is empty if no process exists: the dumps may come from another host or container with the same name. A
    process that started after the dumps were written only reuses the pid.
    """
    here = [info for info in job.rank_info if info.host in (socket.gethostname(), os.uname().nodename)]
    found = {info.rank: _state(info, job.newest) for info in here}
    if all(state == "has ended" for state in found.values()):
        return {}
    return {rank: state for rank, state in found.items() if state}


def _state(info: RankInfo, newest: float) -> str:
    try:
        fields = Path(f"/proc/{info.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "has ended"
    state, start = fields[0], int(fields[19]) / os.sysconf("SC_CLK_TCK")
    if _booted(Path("/proc/stat").read_text().splitlines()) + start > newest + 1:
        return "has ended"
    return {"Z": "has ended", "X": "has ended", "T": "is stopped", "t": "is stopped by a debugger"}.get(state, "")


def _booted(lines: Iterable[str]) -> float:
    return next(float(line.split()[1]) for line in lines if line.startswith("btime "))
