"""Formats the results of tests/gpu/run.sh as tables.

    python tests/gpu/table.py RESULTS_JSON...

The last of several runs counts, for each step and each value. A stopped run has missing values.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LIMIT = "limit-copy"
OURS = ("nccl", "ipc", "staged")
SETTINGS = {"benchmark": "", "benchmark_mps": "with MPS"}


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Markdown: the machine, the steps, and the measurements. Raises ValueError without a run."""
    if not runs:
        raise ValueError("this file has no run")
    runs = sorted(runs, key=lambda run: str(run["date"]))
    parts = [_machine(runs), _steps(runs)]
    figures = _figures(runs)
    return "\n\n".join([*parts, figures] if figures else parts)


def size_text(size: int) -> str:
    """Formats bytes: 4 KiB, 256 MiB."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:g} {unit}"
    return f"{size} B"


def _machine(runs: Sequence[dict[str, Any]]) -> str:
    last = runs[-1]
    machine, versions = last["machine"], last["versions"]
    gpus = "; ".join(machine["gpus"]) or "no GPU"
    driver = f", driver {machine['driver']}" if machine["driver"] else ""
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    host = f"Linux {machine['kernel']}, {machine['processors']} processors"
    return f"{last['date'][:10]}: {gpus}{driver}; {host}; {packages}."


def _steps(runs: Sequence[dict[str, Any]]) -> str:
    latest = {(step["stage"], step["name"]): step for run in runs for step in run["steps"]}
    rows = [("stage", "step", "result", "seconds")]
    for (stage, name), step in sorted(latest.items(), key=lambda item: int(item[0][0] or 0)):
        why = f", {step['why']}" if step["why"] else ""
        seconds = "" if step["status"] == "left out" else str(step["seconds"])
        rows.append((stage or "", name, step["status"] + why, seconds))
    return markdown(rows)


def _figures(runs: Sequence[dict[str, Any]]) -> str:
    latest: dict[tuple[Any, ...], dict[str, float]] = {}
    for run in runs:
        for benchmark, cases in run["benchmarks"].items():
            for case in cases:
                key = (benchmark, case["ranks"], case["bytes"], case["dtype"], case["kind"], case["name"])
                latest[key] = case["median_us"]
    rows = [("ranks", "what", "type", "path", "median", "of the GPU's copy", "fastest other")]
    for (benchmark, ranks, size, dtype, kind, name), medians in sorted(latest.items()):
        others = {other: time for other, time in medians.items() if other not in (*OURS, LIMIT, "limit-pinned")}
        fastest = min(others, key=lambda other: others[other]) if others else None
        for path in OURS:
            if path not in medians:
                continue
            what = f"{name}, {size_text(size)}" if kind == "list" else size_text(size)
            notes = [
                note for note in ("latency" if kind == "latency" else "", SETTINGS.get(benchmark, benchmark)) if note
            ]
            what += f" ({', '.join(notes)})" if notes else ""
            share = f"{medians[LIMIT] / medians[path]:.0%}" if LIMIT in medians else ""
            other = f"{fastest}, {_time(others[fastest])}" if fastest else ""
            rows.append((str(ranks), what, dtype, path, _time(medians[path]), share, other))
    return markdown(rows) if len(rows) > 1 else ""


def _time(microseconds: float) -> str:
    return f"{microseconds / 1000:.2f} ms" if microseconds >= 1000 else f"{microseconds:.1f} us"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table; the first row has its heads."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def main(words: list[str]) -> int:
    """The command line."""
    if not words:
        print(__doc__, file=sys.stderr)
        return 2
    print(table([run for word in words for run in json.loads(Path(word).read_text())["runs"]]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
