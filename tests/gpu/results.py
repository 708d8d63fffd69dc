"""Collects the results of a run of tests/gpu/run.sh.

    python tests/gpu/results.py FOLDER

Reads ``steps.txt`` of the folder (a line for each step: stage, name, status, seconds, reason) and the results of
benchmarks.allreduce in ``benchmark*``, and adds a run to ``results.json`` there. tests/gpu/table.py formats it as a
table.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("dl_comm", "torch", "numpy", "nvidia-nccl-cu13", "nvidia-cuda-nvrtc", "nvidia-nccl-cu12")


def machine() -> dict[str, Any]:
    """The GPUs, their driver, and the host; no GPUs without a driver."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        output = ""
    rows = [[cell.strip() for cell in line.split(",")] for line in output.splitlines() if line.count(",") == 2]
    return {
        "gpus": [f"{name}, {memory}" for name, _, memory in rows],
        "driver": rows[0][1] if rows else None,
        "kernel": platform.release(),
        "processors": os.cpu_count(),
    }


def versions() -> dict[str, str]:
    """The versions of Python and of the installed packages."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def steps(text: str) -> list[dict[str, Any]]:
    """The steps in ``steps.txt``."""
    rows = (line.split("\t") for line in text.splitlines())
    return [
        {"stage": stage or None, "name": name, "status": status, "seconds": int(seconds), "why": why or None}
        for stage, name, status, seconds, why in rows
    ]


def figures(folder: Path) -> list[dict[str, Any]]:
    """The medians of a folder of benchmarks.allreduce, one for each case; empty without results."""
    report = folder / "allreduce.json"
    if not report.exists():
        return []
    return [
        {
            **{key: case[key] for key in ("ranks", "kind", "name", "dtype", "bytes")},
            "median_us": {
                name: result["median_us"] for name, result in case["results"].items() if "median_us" in result
            },
        }
        for case in json.loads(report.read_text())["cases"]
    ]


def gather(folder: Path) -> dict[str, Any]:
    """A run for ``results.json``."""
    done = steps((folder / "steps.txt").read_text())
    measured = {step["name"] for step in done if step["name"].startswith("benchmark") and step["status"] != "left out"}
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "steps": done,
        "benchmarks": {name: figures(folder / name) for name in sorted(measured)},
    }


def main(words: list[str]) -> int:
    """The command line."""
    if len(words) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(words[0])
    report = folder / "results.json"
    runs = json.loads(report.read_text())["runs"] if report.exists() else []
    partial = report.with_suffix(".partial")
    partial.write_text(json.dumps({"runs": [*runs, gather(folder)]}, indent=1) + "\n")
    partial.replace(report)
    print(report)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
