"""Finds the ranks that other ranks wait for, from the dumps of all ranks. Pure.

Each call in which a rank waits is searched on the other ranks. Matched calls are identified by their index among the
matched calls, which is equal on all ranks; the next call, not matched yet, by its signature. A rank without the call is
a rank that the others wait for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dl_comm._base.text import wait_text
from dl_comm.analyze_dumps._dumps import MISMATCH, CallRecord, Dump, JobDumps, Team
from dl_comm.analyze_dumps._findings import Finding, names, ordered
from dl_comm.analyze_dumps._stragglers import findings as straggler_findings
from dl_comm.analyze_dumps._stragglers import stragglers

# In a group: 'rank 1 (rank 3 on h of the job)'.
_LOST = re.compile(r"rank (\d+) on \S+ (?:of the job\) )?(\(pid \d+\) )?(has ended|has called finalize)([^;\n]*)")
_FAILED = re.compile(r"the program failed on rank (\d+) \(pid \d+\)")


@dataclass(frozen=True)
class BlockedCall:
    """A call in which ranks wait, for at most ``seconds``; they submitted it between ``first`` and ``last``."""

    call: CallRecord
    match_index: int
    ranks: tuple[int, ...]
    seconds: float
    first: float
    last: float

    def until(self, moment: float) -> BlockedCall:
        """The same call, known to have waited until ``moment``."""
        return replace(self, seconds=max(self.seconds, moment - self.first))

    @property
    def text(self) -> str:
        """The waiting ranks and their time."""
        return f"{names(self.ranks)} {'has' if len(self.ranks) == 1 else 'have'} waited {wait_text(self.seconds)}"


def analyze(job: JobDumps, states: Mapping[int, str], least: float = 1.0) -> list[Finding]:
    """Returns the findings, most important first; never empty.

    Args:
        job: The dumps.
        states: Current state of the processes on this host by rank: ``has ended`` or ``is stopped``.
        least: Shorter waits (seconds) are ignored.
    """
    lost = _lost_ranks(job, states)
    waits = [wait for wait in _waits(job) if wait.seconds >= least or wait.call.state == "failed"]
    found = [finding for wait in waits for finding in _explain(job, wait, lost)]
    found += _one_sided(job, lost, least)
    found += [_lost(job, rank, how) for rank, how in lost.items() if rank not in _problem_ranks(found)]
    found += _failures(job, found) + _mismatches(job) + _without_dump(job, found)
    if not any(finding.is_problem for finding in found):
        found += straggler_findings(job, stragglers(job))
        idle = all(not call.is_open for dump in job.dumps.values() for call in dump.calls)
        text = "no rank has a call that has not ended" if idle else f"no call has waited for {wait_text(least)}"
        count = f"all {len(job.dumps)}" if not job.missing else f"the {len(job.dumps)}"
        found.append(Finding("idle" if idle else "healthy", (), f"{text}, on {count} ranks with a dump"))
    return ordered(found)


def _one_sided(job: JobDumps, lost: Mapping[int, str], least: float) -> list[Finding]:
    """Ranks that wait in an operation without the others, on a parameter server."""
    found = []
    for dump in job.dumps.values():
        for call in dump.calls:
            seconds = call.seconds(dump.time)
            if call.one_sided and call.state == "running" and seconds >= least and dump.rank not in lost:
                text = f"{job.rank_info[dump.rank]} has waited {wait_text(seconds)} in {call.text}"
                found.append(Finding("stalled_in_call", (dump.rank,), text, call.team, call.title, (), seconds))
    return _group(job, found)


def _problem_ranks(found: list[Finding]) -> set[int]:
    return {rank for finding in found for rank in finding.ranks}


def _lost_ranks(job: JobDumps, states: Mapping[int, str]) -> dict[int, str]:
    """Ranks that have ended or are stopped, according to other ranks' failures and the system."""
    lost: dict[int, str] = {}
    for dump in job.dumps.values():
        for team in dump.teams.values():
            for rank, _, how, detail in _LOST.findall(team.failure or ""):
                lost[int(rank)] = how + detail.rstrip(" .")
            for rank in _FAILED.findall(team.failure or ""):
                # Skip a rank whose program failed because its team had failed.
                if int(rank) not in job.dumps or not _has_failed(job.dumps[int(rank)]):
                    lost.setdefault(int(rank), "has failed: its program ended with an error")
    # After a failure all ranks end. Report only ranks that a failure names, or that have no dump.
    failed = any(team.failure for dump in job.dumps.values() for team in dump.teams.values())
    for rank, how in states.items():
        if how != "has ended" or (not failed and rank in job.missing):
            lost.setdefault(rank, how)
    return lost


def _has_failed(dump: Dump) -> bool:
    """Whether a team of the rank failed for another reason than the failure of a program."""
    return any(team.failure and not _FAILED.search(team.failure) for team in dump.teams.values())


def _waits(job: JobDumps) -> list[BlockedCall]:
    """The calls in which ranks wait, one entry for each team and call."""
    groups: dict[tuple[str, int, str], list[tuple[Dump, CallRecord]]] = {}
    for dump in job.dumps.values():
        for group, team in dump.teams.items():
            head = team.head
            if head is not None:
                index = team.matched + 1 if head.matched is None else head.matched
                groups.setdefault((group, index, head.signature), []).append((dump, head))
    waits = []
    for (_, index, _), members in groups.items():
        seconds = max(call.seconds(dump.time) for dump, call in members)
        submitted = [call.submitted for _, call in members]
        waits.append(
            BlockedCall(
                members[0][1], index, tuple(dump.rank for dump, _ in members), seconds, min(submitted), max(submitted)
            )
        )
    return waits


def _explain(job: JobDumps, wait: BlockedCall, lost: Mapping[int, str]) -> list[Finding]:
    """Explains why the other ranks are not in the call."""
    members = job.dumps[wait.ranks[0]].teams[wait.call.group].members
    others = [rank for rank in sorted(members) if rank not in wait.ranks]
    named = {rank for waiting in wait.ranks for rank in _head(job, waiting, wait.call.group).waiting_for}
    no_response: list[int] = []
    found: list[Finding] = []
    for rank in others:
        dump = job.dumps.get(rank)
        if rank in lost:
            found.append(_finding("lost", rank, wait, f"{job.rank_info[rank]} {lost[rank]}{_waiters(wait)}"))
        elif dump is None:
            no_response += [rank] if rank in named or not named else []
        else:
            found += _why_absent(job, dump, wait)
    if no_response:
        found.append(_no_response(job, no_response, wait))
    if not others:
        found += _all_present(job, wait)
    return _group(job, found)


def _head(job: JobDumps, rank: int, group: str) -> CallRecord:
    head = job.dumps[rank].teams[group].head
    assert head is not None, "the rank waits on the team"
    return head


def _finding(kind: str, rank: int, wait: BlockedCall, text: str) -> Finding:
    return Finding(kind, (rank,), text, wait.call.team, wait.call.title, wait.ranks, wait.seconds)


def _waiters(wait: BlockedCall) -> str:
    return f"; {wait.text} for it in {wait.call.text}"


def _not_called(job: JobDumps, rank: int, wait: BlockedCall) -> str:
    return f"{job.rank_info[rank]} has not called {wait.call.text}, in which {wait.text} for it"


def _why_absent(job: JobDumps, dump: Dump, wait: BlockedCall) -> list[Finding]:
    """Explains why the rank of ``dump`` does not wait in the call."""
    rank, team = dump.rank, dump.teams.get(wait.call.group)
    if team is not None and team.matched >= wait.match_index:
        # The rank has already completed the call or its part of it.
        return []
    still = [call for call in dump.calls if call.is_open]
    here = [call for call in still if call.group == wait.call.group]
    if any(call.signature == wait.call.signature for call in here):
        head = _head(job, rank, wait.call.group)
        behind = f"it is behind {head.text}, which waits{_waiting_for(head)}"
        text = f"{job.rank_info[rank]} has called {wait.call.title}, but {behind}"
        return [_finding("different_call", rank, wait, text)]
    if here:
        head = _head(job, rank, wait.call.group)
        text = f"{_not_called(job, rank, wait)}; it called {head.text} instead, which waits{_waiting_for(head)}"
        return [_finding("different_call", rank, wait, text)]
    if dump.time < wait.last:
        age = wait_text(job.newest - dump.time)
        text = f"{job.rank_info[rank]} has written no dump since {age} before the newest: {_silence_reason(job, rank)}"
        return [_finding("no_response", rank, wait, text + _waiters(wait))]
    if still:
        other = still[0]
        text = f"{_not_called(job, rank, wait)}; it waits in {other.text}{_waiting_for(other)}"
        return [_finding("different_call", rank, wait, text)]
    wait = wait.until(dump.time)
    text = f"{_not_called(job, rank, wait)}; {_last(dump)}: it runs user code"
    location = ", called from ".join(dump.code_location[:3]) or _py_spy_hint(job, rank)
    return [_finding("not_called", rank, wait, f"{text} ({location})")]


def _waiting_for(call: CallRecord) -> str:
    return f" for {names(call.waiting_for)}" if call.waiting_for else ""


def _last(dump: Dump) -> str:
    # Use the highest number of each team: times of very short calls are only accurate to some milliseconds.
    by_team = ([call for call in team.calls if call.ended is not None] for team in dump.teams.values())
    ended = [max(calls, key=lambda call: call.number) for calls in by_team if calls]
    if not ended:
        return "it has made no call"
    last = max(ended, key=lambda call: call.ended or 0.0)
    age = wait_text(dump.time - (last.ended or 0.0))
    return f"its last call was {last.title}, number {last.number}, which ended {age} before its dump"


def _py_spy_hint(job: JobDumps, rank: int) -> str:
    info = job.rank_info[rank]
    return f"py-spy dump --pid {info.pid} on {info.host} shows its location"


def _silence_reason(job: JobDumps, rank: int) -> str:
    info = job.rank_info[rank]
    if any(dump.reason == "SIGUSR1" for dump in job.dumps.values()):
        return "it has ended, is stopped, or did not get the signal"
    return f"it waits for no rank, has ended, or is stopped; run 'kill -USR1 {info.pid}' on {info.host} to find out"


def _no_response(job: JobDumps, ranks: list[int], wait: BlockedCall) -> Finding:
    who = str(job.rank_info[ranks[0]]) if len(ranks) == 1 else names(ranks)
    verb = "has" if len(ranks) == 1 else "have"
    text = f"{who} {verb} written no dump: {_silence_reason(job, ranks[0])}{_waiters(wait)}"
    return Finding("no_response", tuple(ranks), text, wait.call.team, wait.call.title, wait.ranks, wait.seconds)


def _all_present(job: JobDumps, wait: BlockedCall) -> list[Finding]:
    """All ranks are in the call: a rank that waits for no other rank blocks the rest."""
    heads = {rank: _head(job, rank, wait.call.group) for rank in wait.ranks}
    busy = [rank for rank in wait.ranks if not heads[rank].waiting_for and heads[rank].state != "queued"]
    if not busy or len(busy) == len(heads):
        return []
    waiting = tuple(rank for rank in wait.ranks if rank not in busy)
    text = (
        f"{names(busy)} {'is' if len(busy) == 1 else 'are'} in {wait.call.text} like all other ranks, and wait"
        f"{'s' * (len(busy) == 1)} for no rank: slow, stopped, or the dumps are of different times; {names(waiting)} "
        f"{'has' if len(waiting) == 1 else 'have'} waited {wait_text(wait.seconds)}"
    )
    return [Finding("stalled_in_call", tuple(busy), text, wait.call.team, wait.call.title, waiting, wait.seconds)]


def _group(job: JobDumps, found: list[Finding]) -> list[Finding]:
    """Merges more than four findings of one kind into one, with the text of the first."""
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
        text = f"{names(ranks)}: {kind}. For example, {first.text}"
        out.append(Finding(kind, ranks, text, first.team, first.call, first.waiting, first.seconds))
    return out


def _lost(job: JobDumps, rank: int, how: str) -> Finding:
    dump = job.dumps.get(rank)
    last = "" if dump is None else f"; {_last(dump)}"
    return Finding("lost", (rank,), f"{job.rank_info[rank]} {how}{last}")


def _failures(job: JobDumps, found: list[Finding]) -> list[Finding]:
    """Failures of teams, each text once, without those whose cause is already a finding."""
    texts: dict[tuple[str, str], tuple[Team, list[int]]] = {}
    for dump in job.dumps.values():
        for group, team in dump.teams.items():
            if team.failure:
                texts.setdefault((group, team.failure), (team, []))[1].append(dump.rank)
    ended = {rank for finding in found if finding.kind == "lost" for rank in finding.ranks}
    out = []
    for (_, failure), (team, ranks) in texts.items():
        cause = _LOST.search(failure) or _FAILED.search(failure)
        if cause and (int(cause[1]) in ended or cause.re is _FAILED):
            continue
        text = f"{team} has failed on {names(ranks)}: {failure}"
        out.append(Finding("failed", (), text, team.name, waiting=tuple(ranks)))
    return out


def _mismatches(job: JobDumps) -> list[Finding]:
    """The last mismatched calls, each text once."""
    texts: dict[str, tuple[CallRecord, list[int]]] = {}
    for dump in job.dumps.values():
        for call in dump.calls:
            if call.error and call.error.startswith(MISMATCH):
                seen = texts.setdefault(call.error, (call, []))[1]
                seen += [dump.rank] if dump.rank not in seen else []
    last = sorted(texts.items(), key=lambda item: -item[1][0].submitted)[:3]
    return [Finding("mismatch", (), text, call.team, call.title, waiting=tuple(ranks)) for text, (call, ranks) in last]


def _without_dump(job: JobDumps, found: list[Finding]) -> list[Finding]:
    blamed = _problem_ranks([finding for finding in found if finding.is_problem])
    ranks = tuple(rank for rank in job.missing if rank not in blamed)
    if not ranks:
        return []
    text = f"{names(ranks)} {'has' if len(ranks) == 1 else 'have'} written no dump: {_silence_reason(job, ranks[0])}"
    return [Finding("no_dump", ranks, text)]
