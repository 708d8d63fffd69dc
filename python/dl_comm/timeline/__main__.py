"""The command line of ``dl-comm timeline``, or ``python -m dl_comm.timeline``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dl_comm._base.text import time_text
from dl_comm.timeline._files import BadInput, events, find
from dl_comm.timeline._merge import merge
from dl_comm.timeline._metrics import TraceMetrics
from dl_comm.timeline._page import page
from dl_comm.timeline._recent import Recent
from dl_comm.timeline._report import exposed_text, report


def main(arguments: Sequence[str] | None = None, prog: str = "python -m dl_comm.timeline") -> int:
    """Merges the files, writes the report, prints a summary; returns the exit status: 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Reads the timelines that the ranks of a job wrote (DL_COMM_TIMELINE, dl_comm.timeline.start).",
    )
    parser.add_argument("folder", type=Path, help="folder of the files (rank*.trace.json), with sub-folders")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write one trace of all ranks, for Perfetto")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report on steps, stragglers and bandwidth")
    parser.add_argument("--job", metavar="ID", help="which job, if there are several (default: the last)")
    limits = parser.add_mutually_exclusive_group()
    limits.add_argument("--limit", type=float, metavar="GB/S", help="bandwidth limit of a rank, for the report")
    limits.add_argument(
        "--doctor", type=Path, metavar="FILE", help="take the limit from the output of dl_comm.doctor --json"
    )
    options = parser.parse_args(arguments)
    notes: list[str] = []
    try:
        limit = _limit(options.limit, options.doctor)
        found = find(options.folder, options.job, notes.append)
        metrics, recent = TraceMetrics(), Recent()
        for path in found.values():
            for event in events(path, notes.append):
                metrics.add(event)
                recent.add(event)
        if not metrics.ranges:
            raise BadInput(f"the files in {options.folder} have no spans")
        notes += _unrelated_ranks(metrics)
        content = report(metrics, limit)
        if options.output:
            with options.output.open("w", encoding="utf-8") as out:
                merge(found, metrics.first, out, lambda _: None)
        if options.html:
            drawn = recent.rows(metrics, content["stepping"])
            options.html.write_text(page(content, drawn, notes), encoding="utf-8")
    except (BadInput, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    print("\n".join(_summary(content, notes)))
    return 0


def _limit(given: float | None, doctor: Path | None) -> tuple[float, str] | None:
    """The limit in bytes a second, and its source."""
    if given is not None:
        if not given > 0:
            raise BadInput(f"invalid --limit: {given} (expected GB/s above 0)")
        return given * 1e9, "the value of --limit"
    if doctor is None:
        return None
    try:
        measured = _search(json.loads(doctor.read_text(encoding="utf-8")))
    except ValueError as error:
        raise BadInput(f"{doctor} is not JSON: {error}") from None
    if measured is None:
        raise BadInput(f"{doctor} has no limit_gb_per_s: run dl_comm.doctor --json on several ranks, without --quick")
    return measured * 1e9, "the memory-bandwidth limit that dl_comm.doctor measured"


def _search(content: Any) -> float | None:
    """Finds the limit in the doctor's report."""
    if isinstance(content, dict) and isinstance(content.get("limit_gb_per_s"), (int, float)):
        return float(content["limit_gb_per_s"])
    inner = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    return next((found for part in inner if (found := _search(part)) is not None), None)


def _unrelated_ranks(metrics: TraceMetrics) -> list[str]:
    """A note on ranks recorded at another time than the first one: files of an older run in the same folder."""
    first = next(iter(metrics.ranges))
    low, high = metrics.ranges[first]
    apart = [rank for rank, (begin, end) in metrics.ranges.items() if begin > high or end < low]
    text = f"ranks {', '.join(map(str, apart))} and rank {first} were recorded at different times: are they of one run?"
    return [text] if apart else []


def _summary(content: dict[str, Any], notes: list[str]) -> list[str]:
    view, steps = content["all"], content["all"]["steps"]
    lines = [
        *(f"note: {note}" for note in notes),
        f"{len(content['ranks'])} ranks, {time_text(content['seconds'])}, {view['calls']} calls"
        + (f", {view['failed']} of them failed" if view["failed"] else ""),
        f"steps: {steps['count']}, median {time_text(steps['median_s'])}, 95 % below {time_text(steps['p95_s'])}",
        f"exposed communication a step: {exposed_text(steps)}; overlap {view['overlap']:.0%}",
    ]
    for row in view["last"][:3]:
        lines.append(
            f"rank {row['rank']} came last {row['times']} times, {time_text(row['seconds'])} after the one before"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
