"""Reads the files of a timeline, ``rankN.trace.json``, event by event, so that files of any size fit in memory.

The core writes one event on a line. If a rank was killed, the end of its file is missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Log = Callable[[str], None]

_PHASES = ("X", "M")


class BadInput(Exception):
    """The folder has no readable timeline; the text says why."""


def find(folder: Path, job: str | None = None, log: Log = lambda _: None) -> dict[int, Path]:
    """The files of one job in ``folder`` and its sub-folders, by rank; the newer one of two for a rank.

    Args:
        folder: The folder.
        job: Which job; None: the one that wrote last.
        log: Gets a note for each skipped job.

    Raises:
        BadInput: The folder is missing, or has no file of that job.
    """
    if not folder.is_dir():
        raise BadInput(f"{folder} is not a folder")
    jobs: dict[str, dict[int, Path]] = {}
    for path in sorted(folder.rglob("rank*.trace.json"), key=lambda path: path.stat().st_mtime):
        rank = path.name.removeprefix("rank").removesuffix(".trace.json")
        if rank.isdigit():
            name = _job(path)
            # Jobs are sorted by their last write.
            jobs[name] = {**jobs.pop(name, {}), int(rank): path}
    if not jobs:
        raise BadInput(f"{folder} has no timeline (rank*.trace.json)")
    if job is not None and job not in jobs:
        raise BadInput(f"{folder} has no timeline of job {job}; there are {', '.join(filter(None, jobs))}")
    chosen = list(jobs)[-1] if job is None else job
    for other, files in jobs.items():
        if other != chosen and job is None:
            how = f"--job {other} reads it" if other else "the files are of an older version"
            log(f"another job is left out, {len(files)} rank(s) {f'of job {other}, ' if other else ''}{how}")
    return dict(sorted(jobs[chosen].items()))


def _job(path: Path) -> str:
    """The job of a file; empty in files of older versions."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        next(lines, "")
        event = _event(next(lines, "").strip().rstrip(",")) or {"args": {}}
    args = event["args"]
    return str(args.get("job", "")) if isinstance(args, dict) else ""


def events(path: Path, log: Log) -> Iterator[Event]:
    """The events of a file in their order; ``log`` gets a note if the end is missing.

    Raises:
        BadInput: The file is not from dl_comm, or is damaged before its end.
    """
    complete, broken = False, 0
    with path.open(encoding="utf-8", errors="replace") as lines:
        if (first := next(lines, "").strip()) != "[":
            raise BadInput(f"{path} is not a timeline of dl_comm: it begins with {first[:40]!r}")
        for number, line in enumerate(lines, 2):
            text = line.strip().rstrip(",")
            if broken:
                raise BadInput(f"{path} is damaged in line {broken}")
            if text in ("", "]"):
                complete = complete or text == "]"
                continue
            event = _event(text)
            if event is None:
                broken = number  # allowed for the last line
            else:
                yield event
    if not complete:
        log(f"{path} ends in the middle: its rank was killed or still runs; using the complete part")


def _event(text: str) -> Event | None:
    try:
        event = json.loads(text)
    except ValueError:
        return None
    if not isinstance(event, dict) or event.get("ph") not in _PHASES or not isinstance(event.get("pid"), int):
        return None
    if event["ph"] == "X" and not all(isinstance(event.get(key), (int, float)) for key in ("ts", "dur", "tid")):
        return None
    return {"args": {}, "cat": "", "name": "", **event}
