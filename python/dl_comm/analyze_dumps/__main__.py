"""The command line of ``python -m dl_comm.analyze_dumps``."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from dl_comm.analyze_dumps._analysis import analyze
from dl_comm.analyze_dumps._dumps import BadInput, JobDumps, read
from dl_comm.analyze_dumps._findings import Finding, names, time_text
from dl_comm.analyze_dumps._processes import states
from dl_comm.analyze_dumps._stragglers import Straggler, stragglers

_ROWS = 5


def main() -> int:
    """Says what the dumps tell; returns the exit status: 0 nobody to blame, 1 somebody, 2 nothing to read."""
    parser = argparse.ArgumentParser(
        prog="python -m dl_comm.analyze_dumps",
        description="Reads the dumps of all ranks of a job and says which rank, which call, which tensor others wait "
        "for. Exits with 0 when there is nobody to blame, 1 when there is, 2 when there is nothing to read.",
    )
    parser.add_argument("folder", type=Path, help="where the dumps are (rank*.json), also in sub-folders")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--least", type=float, default=1.0, metavar="SECONDS", help="pass over waits that are shorter (default: 1)"
    )
    options = parser.parse_args()
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
        lines += ["", "for whom the others waited, in the calls that are remembered:"]
        for row in table[:_ROWS]:
            lines.append(
                f"  {names(row.ranks):<10} {time_text(row.seconds):>8} in {row.calls} calls, by {names(row.waiting)}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
