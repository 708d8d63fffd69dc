"""Who was slow: for whom the threads of the other ranks waited, summed over the calls that the dumps remember."""

from __future__ import annotations

from dataclasses import dataclass

from dl_comm.analyze_dumps._dumps import JobDumps
from dl_comm.analyze_dumps._findings import Finding, names, time_text

# Waits make up this share of the time of those who wait, and the first is this much of all: then one is to be named.
_SHARE = 0.1
_MOST = 0.5
_SECONDS = 0.1


@dataclass(frozen=True)
class Straggler:
    """Others waited ``seconds`` for ``ranks`` (one, or all of another host), the sum over ``calls`` and who waited."""

    ranks: tuple[int, ...]
    seconds: float
    calls: int
    waiting: tuple[int, ...]


def stragglers(job: JobDumps) -> list[Straggler]:
    """For whom others waited, most first."""
    sums: dict[tuple[int, ...], tuple[float, int, set[int]]] = {}
    for dump in job.dumps.values():
        for call in dump.calls:
            for ranks, seconds in call.waits:
                before, calls, waiting = sums.get(ranks, (0.0, 0, set()))
                sums[ranks] = (before + seconds, calls + 1, waiting | {dump.rank})
    rows = [Straggler(ranks, seconds, calls, tuple(sorted(who))) for ranks, (seconds, calls, who) in sums.items()]
    return sorted(rows, key=lambda row: -row.seconds)


def findings(job: JobDumps, table: list[Straggler]) -> list[Finding]:
    """Names the first of the table, when it is what costs time."""
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
        f"the others waited most for {names(first.ranks)}: {names(first.waiting)} "
        f"{time_text(each)} each, of the {time_text(window)} that the remembered calls cover"
    )
    return [Finding("straggler", first.ranks, text, waiting=first.waiting, seconds=first.seconds)]
