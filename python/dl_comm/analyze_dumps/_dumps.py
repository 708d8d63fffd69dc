"""Reads and checks the dumps of a job, ``rankN.json``.

A folder may have dumps of several jobs, also in sub-folders (one for each host, for example). The newest job counts,
and the newest dump of each rank. ``docs/diagnosis.md`` describes the format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = "dl_comm dump 2"
MISMATCH = "collective mismatch"
_OPEN = ("queued", "matching", "running")
# Errors that leave the ranks in sync, as if the call had not been made.
_HARMLESS = (MISMATCH, "the team has ended")


class BadInput(Exception):
    """The folder has no readable dump; the text says why."""


@dataclass(frozen=True)
class CallRecord:
    """A call of a rank; ranks are those of the job, times seconds since 1970, by the clock of the rank's host."""

    team: int | str
    """The number of a team, or the name of another group."""
    group: str
    """Names the group on all its members, and nowhere else."""
    number: int
    matched: int | None
    title: str
    signature: str
    state: str
    error: str | None
    tensors: tuple[str, ...]
    count: int
    submitted: float
    ended: float | None
    waits: tuple[tuple[tuple[int, ...], float], ...]
    waiting_for: tuple[int, ...]
    one_sided: bool = False
    """Whether the rank makes it without the others."""

    @property
    def is_open(self) -> bool:
        """Whether it is incomplete: it still waits, or waited until its team failed."""
        return self.state in _OPEN or (self.state == "failed" and not (self.error or "").startswith(_HARMLESS))

    def seconds(self, now: float) -> float:
        """Seconds from its submission to its end or ``now``."""
        return (now if self.ended is None else self.ended) - self.submitted

    @property
    def text(self) -> str:
        """The call and its first tensor."""
        if not self.tensors:
            return self.title
        first = self.tensors[0]
        more = f" and {self.count - 1} more" if self.count > 1 else ""
        return f"{self.title} ({first}{more})"


@dataclass(frozen=True)
class Team:
    """A team or another group in the dump of one rank; ``members`` are ranks of the job, ``calls`` oldest first."""

    name: int | str
    members: tuple[int, ...]
    matched: int
    failure: str | None
    calls: tuple[CallRecord, ...]

    def __str__(self) -> str:
        return f"group '{self.name}'" if isinstance(self.name, str) else f"team {self.name}"

    @property
    def head(self) -> CallRecord | None:
        """The oldest incomplete call of all ranks; calls in progress precede queued ones."""
        still = [call for call in self.calls if call.is_open and not call.one_sided]
        return next((call for call in still if call.state != "queued"), still[0] if still else None)


@dataclass(frozen=True)
class RankInfo:
    """Host and process of a rank."""

    rank: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid})"


@dataclass(frozen=True)
class Dump:
    """The dump of one rank."""

    path: Path
    job: str
    reason: str
    time: float
    rank: int
    rank_info: tuple[RankInfo, ...]
    teams: dict[str, Team]
    """By what names the group on all its members."""
    stacks: tuple[str, ...] = ()

    @property
    def code_location(self) -> list[str]:
        """Frames of Python's main thread, ``train.py, line 7 in load``, innermost first; empty if unknown."""
        lines = list(self.stacks)
        threads = [index for index, line in enumerate(lines) if line.lower().startswith(("thread ", "current thread "))]
        # faulthandler writes the main thread last.
        last = lines[threads[-1] :] if threads else []
        frames = (re.match(r'  File "(.*)", line (\d+) in (.*)', line) for line in last)
        return [f"{Path(found[1]).name}, line {found[2]} in {found[3]}" for found in frames if found]

    @property
    def calls(self) -> list[CallRecord]:
        """The calls of all teams."""
        return [call for team in self.teams.values() for call in team.calls]


@dataclass(frozen=True)
class JobDumps:
    """All dumps of a job, by rank. ``notes`` lists skipped files and jobs."""

    name: str
    rank_info: tuple[RankInfo, ...]
    dumps: dict[int, Dump]
    notes: tuple[str, ...] = ()

    @property
    def missing(self) -> list[int]:
        """The ranks without a dump."""
        return [info.rank for info in self.rank_info if info.rank not in self.dumps]

    @property
    def newest(self) -> float:
        """When the last dump was written."""
        return max(dump.time for dump in self.dumps.values())


def read(folder: Path) -> JobDumps:
    """Reads the dumps in ``folder`` and its sub-folders.

    Raises:
        BadInput: The folder is missing or has no dump.
    """
    if not folder.is_dir():
        raise BadInput(f"{folder} is not a folder")
    found: list[Dump] = []
    notes: list[str] = []
    for path in sorted(folder.rglob("rank*.json")):
        if path.name.endswith(".trace.json"):
            continue
        try:
            found.append(_dump(path))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            notes.append(f"{path} is not a dump of dl_comm, skipped: {_why(error)}")
    if not found:
        raise BadInput("; ".join([f"{folder} has no dump (rank*.json) of dl_comm", *notes]))
    return _newest_job(found, notes)


def _newest_job(found: Iterable[Dump], notes: list[str]) -> JobDumps:
    jobs: dict[str, list[Dump]] = {}
    for dump in sorted(found, key=lambda dump: dump.time):
        jobs.setdefault(dump.job, []).append(dump)
    name = max(jobs, key=lambda job: jobs[job][-1].time)
    others = len(jobs) - 1
    if others:
        notes.append(f"skipped dumps of {others} other job{'s' * (others > 1)}; job {name} is the newest")
    dumps = {dump.rank: dump for dump in jobs[name]}  # a later one replaces an earlier one
    return JobDumps(name, jobs[name][-1].rank_info, dict(sorted(dumps.items())), tuple(notes))


def _why(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _dump(path: Path) -> Dump:
    content = json.loads(path.read_text())
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"its format is not '{FORMAT}'")
    rank_info = tuple(RankInfo(int(info["rank"]), str(info["host"]), int(info["pid"])) for info in content["ranks"])
    rank = int(content["rank"])
    if [info.rank for info in rank_info] != list(range(int(content["size"]))) or not 0 <= rank < len(rank_info):
        raise ValueError("its list of ranks is inconsistent")
    teams = {_group(team): _team(team, len(rank_info)) for team in content["teams"]}
    time, reason = float(content["time"]), str(content["reason"])
    stacks = tuple(map(str, content.get("stacks", ())))  # older dumps have none
    return Dump(path, str(content["job"]), reason, time, rank, rank_info, teams, stacks)


def _group(team: dict[str, Any]) -> str:
    return str(team.get("group", team["team"]))  # older dumps have teams only


def _team(team: dict[str, Any], size: int) -> Team:
    name = team["team"]
    if not isinstance(name, int | str):
        raise ValueError(f"a team is named {name!r}")
    members = tuple(map(int, team.get("members", range(size))))
    if not set(members) <= set(range(size)):
        raise ValueError(f"the members of team {name!r} are no ranks of the job: {members}")
    calls = tuple(_call(name, _group(team), call) for call in team["calls"])
    return Team(name, members, int(team["matched"]), team["failure"], calls)


def _call(team: int | str, group: str, call: dict[str, Any]) -> CallRecord:
    submitted, ended = float(call["submitted"]), call["ended_s"]
    if call["state"] not in (*_OPEN, "done", "failed"):
        raise ValueError(f"a call is in state {call['state']!r}")
    return CallRecord(
        team=team,
        group=group,
        number=int(call["number"]),
        matched=call["match_index"],
        title=str(call["name"]),
        signature=str(call["signature"]),
        state=str(call["state"]),
        error=call["error"],
        tensors=tuple(map(str, call["tensors"])),
        count=int(call["num_tensors"]),
        submitted=submitted,
        ended=None if ended is None else submitted + float(ended),
        waits=tuple((tuple(map(int, wait["ranks"])), float(wait["seconds"])) for wait in call["waits"]),
        waiting_for=tuple(map(int, call["waiting_for"])),
        one_sided=bool(call.get("one_sided", False)),  # older dumps have none
    )
