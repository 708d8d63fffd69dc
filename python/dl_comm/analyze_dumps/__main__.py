"""The command line of ``dl-comm dumps``, or ``python -m dl_comm.analyze_dumps``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from dl_comm._base.text import wait_text
from dl_comm.analyze_dumps._analysis import analyze
from dl_comm.analyze_dumps._dumps import BadInput, JobDumps, read
from dl_comm.analyze_dumps._findings import Finding, names
from dl_comm.analyze_dumps._processes import states
from dl_comm.analyze_dumps._stragglers import Straggler, stragglers

_ROWS = 5


def main(arguments: Sequence[str] | None = None, prog: str = "python -m dl_comm.analyze_dumps") -> int:
    """Prints the findings; returns the exit status: 0 no problem, 1 a problem, 2 no dumps."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Reads the dumps of all ranks and prints the rank, call and tensor that the others wait for. "
        "Exit status: 0 without a problem, 1 with one, 2 without dumps.",
    )
    parser.add_argument("folder", type=Path, help="folder of the dumps (rank*.json), with sub-folders")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--least", type=float, default=1.0, metavar="SECONDS", help="ignore shorter waits (default: 1)")
    options = parser.parse_args(arguments)
    try:
        job = read(options.folder)
    except BadInput as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    findings, table = analyze(job, states(job), options.least), stragglers(job)
    print(_as_json(job, findings, table) if options.json else _as_text(job, findings, table))
    return int(any(finding.is_problem for finding in findings))


def _as_json(job: JobDumps, findings: list[Finding], table: list[Straggler]) -> str:
    content = {
        "job": job.name,
        "size": len(job.rank_info),
        "ranks": [asdict(info) for info in job.rank_info],
        "dumps": {rank: {"time": dump.time, "reason": dump.reason} for rank, dump in job.dumps.items()},
        "notes": job.notes,
        "findings": [{**asdict(finding), "is_problem": finding.is_problem} for finding in findings],
        "stragglers": [asdict(row) for row in table],
    }
    return json.dumps(content, indent=2)


def _as_text(job: JobDumps, findings: list[Finding], table: list[Straggler]) -> str:
    size, hosts = len(job.rank_info), len({info.host for info in job.rank_info})
    last = max(job.dumps.values(), key=lambda dump: dump.time)
    when = datetime.fromtimestamp(last.time).strftime("%Y-%m-%d %H:%M:%S")
    dumps = f"{len(job.dumps)} dump{'s' * (len(job.dumps) > 1)}"
    lines = [
        f"job {job.name}: {size} rank{'s' * (size > 1)} on {hosts} host{'s' * (hosts > 1)}, {dumps}, "
        f"the newest of rank {last.rank}, {when} ({last.reason})",
        *(f"note: {note}" for note in job.notes),
    ]
    for finding in findings:
        lines += ["", finding.text]
    if table:
        lines += ["", "waits in the recorded calls, longest first:"]
        for row in table[:_ROWS]:
            lines.append(
                f"  {names(row.ranks):<10} {wait_text(row.seconds):>8} in {row.calls} calls, by {names(row.waiting)}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
