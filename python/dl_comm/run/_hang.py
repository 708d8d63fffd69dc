"""The rank that made the others miss a deadline, from the dumps that all ranks wrote when a call waited for long."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from dl_comm.analyze_dumps._analysis import analyze
from dl_comm.analyze_dumps._dumps import BadInput, JobDumps, read
from dl_comm.run._listener import Rank, missed_deadline

_KINDS = ("not_called", "different_call", "no_response", "stalled_in_call")


def hang(ranks: Mapping[int, Rank], folders: Iterable[Path], since: float) -> str:
    """Names the rank that the others waited for and its line of code; empty if no rank missed a deadline.

    Args:
        ranks: The ranks of the job.
        folders: Where the dumps may be, those of earlier jobs too.
        since: When the job started, in seconds since 1970.
    """
    first = min(
        (rank for rank in ranks.values() if rank.order is not None), key=lambda rank: rank.order or 0, default=None
    )
    if first is None or not any(map(missed_deadline, ranks.values())):
        return ""
    for job in filter(None, map(_dumps, folders)):
        if job.newest < since:
            continue
        # The ranks have ended since then, but that is not why the others waited.
        for finding in analyze(job, {}):
            if finding.kind in _KINDS:
                return finding.text
    return ""


def _dumps(folder: Path) -> JobDumps | None:
    try:
        return read(folder)
    except BadInput:
        return None
