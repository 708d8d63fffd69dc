"""Who is to blame, from the dumps of all ranks. Pure: what it says follows from its arguments.

A call that waits on one rank is looked for on the others: calls that the ranks have matched by their place among the
matched ones, which is the same on all; the next one, which is not matched yet, by its signature. Who has not got it is
what the others wait for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dl_comm.blame._dumps import MISMATCH, Call, Dump, Job
from dl_comm.blame._findings import Finding, names, ordered, time_text
from dl_comm.blame._lateness import findings as late_findings
from dl_comm.blame._lateness import late_ranks

_ENDED = re.compile(r"rank (\d+) on \S+ (\(pid \d+\) )?(has ended|has called finalize)([^;\n]*)")
_FAILED = re.compile(r"the program failed on rank (\d+) \(pid \d+\)")


@dataclass(frozen=True)
class Wait:
    """Ranks that wait in the same call, ``seconds`` at the longest; they came to it between ``first`` and ``last``."""

    call: Call
    place: int
    ranks: tuple[int, ...]
    seconds: float
    first: float
    last: float

    def until(self, moment: float) -> Wait:
        """The same, when it is known to have gone on until ``moment``."""
        return replace(self, seconds=max(self.seconds, moment - self.first))

    @property
    def words(self) -> str:
        """Who waits how long."""
        return f"{names(self.ranks)} {'has' if len(self.ranks) == 1 else 'have'} waited {time_text(self.seconds)}"


def judge(job: Job, states: Mapping[int, str], least: float = 1.0) -> list[Finding]:
    """What there is to say, most important first; never empty.

    Args:
        job: The dumps.
        states: What the system says now of the processes of ranks on this host: ``has ended`` or ``is stopped``.
        least: Waits below this many seconds are what happens in a healthy job.
    """
    gone = _gone(job, states)
    waits = [wait for wait in _waits(job) if wait.seconds >= least or wait.call.state == "failed"]
    found = [finding for wait in waits for finding in _blame(job, wait, gone)]
    found += [_ended(job, rank, how) for rank, how in gone.items() if rank not in _blamed(found)]
    found += _failures(job, found) + _mismatches(job) + _without_dump(job, found)
    if not any(finding.blames for finding in found):
        found += late_findings(job, late_ranks(job))
        idle = all(not call.is_open for dump in job.dumps.values() for call in dump.calls)
        words = "no rank has a call that has not ended" if idle else f"no call has waited for {time_text(least)}"
        count = f"all {len(job.dumps)}" if not job.missing else f"the {len(job.dumps)}"
        found.append(Finding("idle" if idle else "well", (), f"{words}, on {count} ranks that have written a dump"))
    return ordered(found)


def _blamed(found: list[Finding]) -> set[int]:
    return {rank for finding in found for rank in finding.ranks}


def _gone(job: Job, states: Mapping[int, str]) -> dict[int, str]:
    """The ranks that have ended, or are stopped, by what the failures of others and the system say."""
    gone: dict[int, str] = {}
    for dump in job.dumps.values():
        for team in dump.teams.values():
            for rank, _, how, detail in _ENDED.findall(team.failure or ""):
                gone[int(rank)] = how + detail.rstrip(" .")
            for rank in _FAILED.findall(team.failure or ""):
                # Not when its program failed because a team of it did.
                if int(rank) not in job.dumps or not _has_failed(job.dumps[int(rank)]):
                    gone.setdefault(int(rank), "has failed: its program ended with an error")
    # After a failure all ranks end: that is news only of a rank for which a failure or a missing dump speaks.
    failed = any(team.failure for dump in job.dumps.values() for team in dump.teams.values())
    for rank, how in states.items():
        if how != "has ended" or (not failed and rank in job.missing):
            gone.setdefault(rank, how)
    return gone


def _has_failed(dump: Dump) -> bool:
    """Whether a team of the rank failed for a reason other than the end of a program."""
    return any(team.failure and not _FAILED.search(team.failure) for team in dump.teams.values())


def _waits(job: Job) -> list[Wait]:
    """The calls in which ranks wait, for each team and call one."""
    groups: dict[tuple[int, int, str], list[tuple[Dump, Call]]] = {}
    for dump in job.dumps.values():
        for team in dump.teams.values():
            head = team.head
            if head is not None:
                place = team.matched + 1 if head.matched is None else head.matched
                groups.setdefault((team.number, place, head.signature), []).append((dump, head))
    waits = []
    for (_, place, _), members in groups.items():
        seconds = max(call.seconds(dump.time) for dump, call in members)
        came = [call.submitted for _, call in members]
        waits.append(Wait(members[0][1], place, tuple(dump.rank for dump, _ in members), seconds, min(came), max(came)))
    return waits


def _blame(job: Job, wait: Wait, gone: Mapping[int, str]) -> list[Finding]:
    """Why the others are not in the call."""
    others = [place.rank for place in job.places if place.rank not in wait.ranks]
    named = {rank for waiting in wait.ranks for rank in _head(job, waiting, wait.call.team).waiting_for}
    silent: list[int] = []
    found: list[Finding] = []
    for rank in others:
        dump = job.dumps.get(rank)
        if rank in gone:
            found.append(_finding("ended", rank, wait, f"{job.places[rank]} {gone[rank]}{_wanted(wait)}"))
        elif dump is None:
            silent += [rank] if rank in named or not named else []
        else:
            found += _why_not(job, dump, wait)
    if silent:
        found.append(_silent(job, silent, wait))
    if not others:
        found += _all_in(job, wait)
    return _together(job, found)


def _head(job: Job, rank: int, team: int) -> Call:
    head = job.dumps[rank].teams[team].head
    assert head is not None, "the rank waits on the team"
    return head


def _finding(kind: str, rank: int, wait: Wait, text: str) -> Finding:
    return Finding(kind, (rank,), text, wait.call.team, wait.call.title, wait.ranks, wait.seconds)


def _wanted(wait: Wait) -> str:
    return f"; {wait.words} for it in {wait.call.words}"


def _not_called(job: Job, rank: int, wait: Wait) -> str:
    return f"{job.places[rank]} has not called {wait.call.words}, in which {wait.words} for it"


def _why_not(job: Job, dump: Dump, wait: Wait) -> list[Finding]:
    """Why the rank of ``dump``, which does not wait in the call, does not."""
    rank, team = dump.rank, dump.teams.get(wait.call.team)
    if team is not None and team.matched >= wait.place:
        # It has been in this call: it is through, or its part is done.
        return []
    still = [call for call in dump.calls if call.is_open]
    here = [call for call in still if call.team == wait.call.team]
    if any(call.signature == wait.call.signature for call in here):
        head = _head(job, rank, wait.call.team)
        text = (
            f"{job.places[rank]} has called {wait.call.title}, but it is behind {head.words}, which waits{_whom(head)}"
        )
        return [_finding("other call", rank, wait, text)]
    if here:
        head = _head(job, rank, wait.call.team)
        text = f"{_not_called(job, rank, wait)}; it called {head.words} instead, which waits{_whom(head)}"
        return [_finding("other call", rank, wait, text)]
    if dump.time < wait.last:
        age = time_text(job.newest - dump.time)
        text = f"{job.places[rank]} has written no dump since {age} before the newest: {_quiet(job, rank)}"
        return [_finding("silent", rank, wait, text + _wanted(wait))]
    if still:
        other = still[0]
        text = f"{_not_called(job, rank, wait)}; it waits in {other.words}{_whom(other)}"
        return [_finding("other call", rank, wait, text)]
    wait = wait.until(dump.time)
    text = f"{_not_called(job, rank, wait)}; {_last(dump)}: it is in its own code"
    place = ", called from ".join(dump.place_in_code[:3]) or _look(job, rank)
    return [_finding("not called", rank, wait, f"{text} ({place})")]


def _whom(call: Call) -> str:
    return f" for {names(call.waiting_for)}" if call.waiting_for else ""


def _last(dump: Dump) -> str:
    # Of a team, that of the highest number: the times of very short calls are told to some milliseconds only.
    by_team = ([call for call in team.calls if call.ended is not None] for team in dump.teams.values())
    ended = [max(calls, key=lambda call: call.number) for calls in by_team if calls]
    if not ended:
        return "it has made no call at all"
    last = max(ended, key=lambda call: call.ended or 0.0)
    age = time_text(dump.time - (last.ended or 0.0))
    return f"its last call was {last.title}, number {last.number}, which ended {age} before its dump"


def _look(job: Job, rank: int) -> str:
    place = job.places[rank]
    return f"py-spy dump --pid {place.pid} on {place.host} shows where"


def _quiet(job: Job, rank: int) -> str:
    place = job.places[rank]
    if any(dump.reason == "SIGUSR1" for dump in job.dumps.values()):
        return "it has ended, is stopped, or was not sent the signal"
    return f"it waits for nobody, or has ended, or is stopped; 'kill -USR1 {place.pid}' on {place.host} tells which"


def _silent(job: Job, ranks: list[int], wait: Wait) -> Finding:
    who = str(job.places[ranks[0]]) if len(ranks) == 1 else names(ranks)
    verb = "has" if len(ranks) == 1 else "have"
    text = f"{who} {verb} written no dump: {_quiet(job, ranks[0])}{_wanted(wait)}"
    return Finding("silent", tuple(ranks), text, wait.call.team, wait.call.title, wait.ranks, wait.seconds)


def _all_in(job: Job, wait: Wait) -> list[Finding]:
    """All ranks are in the call: who waits for nobody there keeps the others."""
    heads = {rank: _head(job, rank, wait.call.team) for rank in wait.ranks}
    busy = [rank for rank in wait.ranks if not heads[rank].waiting_for and heads[rank].state != "queued"]
    if not busy or len(busy) == len(heads):
        return []
    waiting = tuple(rank for rank in wait.ranks if rank not in busy)
    text = (
        f"{names(busy)} {'is' if len(busy) == 1 else 'are'} in {wait.call.words} like all others, and wait"
        f"{'s' * (len(busy) == 1)} for nobody: slow, stopped, or the dumps are of different moments; {names(waiting)} "
        f"{'has' if len(waiting) == 1 else 'have'} waited {time_text(wait.seconds)}"
    )
    return [Finding("running", tuple(busy), text, wait.call.team, wait.call.title, waiting, wait.seconds)]


def _together(job: Job, found: list[Finding]) -> list[Finding]:
    """Many ranks of which the same is to be said become one finding, with the words of the first."""
    kinds: dict[str, list[Finding]] = {}
    for finding in found:
        kinds.setdefault(finding.kind, []).append(finding)
    out: list[Finding] = []
    for kind, same in kinds.items():
        if len(same) <= 4:
            out += same
            continue
        first = same[0]
        ranks = tuple(rank for finding in same for rank in finding.ranks)
        text = f"{names(ranks)}: {kind}. Of these, {first.text}"
        out.append(Finding(kind, ranks, text, first.team, first.call, first.waiting, first.seconds))
    return out


def _ended(job: Job, rank: int, how: str) -> Finding:
    dump = job.dumps.get(rank)
    last = "" if dump is None else f"; {_last(dump)}"
    return Finding("ended", (rank,), f"{job.places[rank]} {how}{last}")


def _failures(job: Job, found: list[Finding]) -> list[Finding]:
    """The failures of teams, each text once; not those that only say what was found to be the cause."""
    texts: dict[tuple[int, str], list[int]] = {}
    for dump in job.dumps.values():
        for team in dump.teams.values():
            if team.failure:
                texts.setdefault((team.number, team.failure), []).append(dump.rank)
    ended = {rank for finding in found if finding.kind == "ended" for rank in finding.ranks}
    out = []
    for (number, failure), ranks in texts.items():
        cause = _ENDED.search(failure) or _FAILED.search(failure)
        if cause and (int(cause[1]) in ended or cause.re is _FAILED):
            continue
        out.append(
            Finding(
                "failed", (), f"team {number} has failed on {names(ranks)}: {failure}", number, waiting=tuple(ranks)
            )
        )
    return out


def _mismatches(job: Job) -> list[Finding]:
    """The last calls that did not match, each text once."""
    texts: dict[str, tuple[Call, list[int]]] = {}
    for dump in job.dumps.values():
        for call in dump.calls:
            if call.error and call.error.startswith(MISMATCH):
                seen = texts.setdefault(call.error, (call, []))[1]
                seen += [dump.rank] if dump.rank not in seen else []
    last = sorted(texts.items(), key=lambda item: -item[1][0].submitted)[:3]
    return [Finding("mismatch", (), text, call.team, call.title, waiting=tuple(ranks)) for text, (call, ranks) in last]


def _without_dump(job: Job, found: list[Finding]) -> list[Finding]:
    blamed = _blamed([finding for finding in found if finding.blames])
    ranks = tuple(rank for rank in job.missing if rank not in blamed)
    if not ranks:
        return []
    text = f"{names(ranks)} {'has' if len(ranks) == 1 else 'have'} written no dump: {_quiet(job, ranks[0])}"
    return [Finding("no dump", ranks, text)]
