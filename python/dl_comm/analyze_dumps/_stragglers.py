"""Stragglers: how long the threads of other ranks waited for each rank, summed over the recorded calls."""

from __future__ import annotations

from dataclasses import dataclass

from dl_comm._base.text import wait_text
from dl_comm.analyze_dumps._dumps import JobDumps
from dl_comm.analyze_dumps._findings import Finding, names

# Report a straggler if its waits take _SHARE of the waiting ranks' time, _SECONDS, and _MOST of all waits.
_SHARE = 0.1
_MOST = 0.5
_SECONDS = 0.1


@dataclass(frozen=True)
class Straggler:
    """The ranks in ``waiting`` waited ``seconds`` in total for ``ranks`` (one, or a whole host), in ``calls`` calls."""

    ranks: tuple[int, ...]
    seconds: float
    calls: int
    waiting: tuple[int, ...]


def stragglers(job: JobDumps) -> list[Straggler]:
    """All ranks that others waited for, longest wait first."""
    sums: dict[tuple[int, ...], tuple[float, int, set[int]]] = {}
    for dump in job.dumps.values():
        for call in dump.calls:
            for ranks, seconds in call.waits:
                before, calls, waiting = sums.get(ranks, (0.0, 0, set()))
                sums[ranks] = (before + seconds, calls + 1, waiting | {dump.rank})
    rows = [Straggler(ranks, seconds, calls, tuple(sorted(who))) for ranks, (seconds, calls, who) in sums.items()]
    return sorted(rows, key=lambda row: -row.seconds)


def findings(job: JobDumps, table: list[Straggler]) -> list[Finding]:
    """A finding for the first row of the table, if its waits are significant."""
    if not table:
        return []
    first, total = table[0], sum(row.seconds for row in table)
    spans = [call for dump in job.dumps.values() for call in dump.calls if not call.is_open]
    if not spans:
        return []
    window = max(call.ended or call.submitted for call in spans) - min(call.submitted for call in spans)
    each = first.seconds / len(first.waiting)
    if first.seconds < _MOST * total or each < max(_SHARE * window, _SECONDS):
        return []
    text = (
        f"straggler {names(first.ranks)}: {names(first.waiting)} waited for it "
        f"{wait_text(each)} each, of the {wait_text(window)} that the recorded calls cover"
    )
    return [Finding("straggler", first.ranks, text, waiting=first.waiting, seconds=first.seconds)]
