"""The final report: the rank that failed first, the cause, its last lines, and how the other ranks ended. Pure.

A rank that exited by itself sorts before stopped ranks: after a failure, launchers stop the other ranks with signals. A
rank that reports a lost peer sorts after that peer, even if it exited earlier.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dl_comm._base.text import runs_text
from dl_comm.run._listener import Rank

_HINTS = {
    signal.SIGABRT: "it called abort(), often after an assertion or an uncaught C++ exception",
    signal.SIGBUS: "often a full /dev/shm, or a mapped file that was truncated",
    signal.SIGILL: "often a library built for another processor",
    signal.SIGKILL: "killed by a user or the system",
    signal.SIGXCPU: "CPU time limit exceeded",
}
# A frame of a traceback, and a line of text after it; torch.distributed puts the rank before both. The frames of
# faulthandler, whose text comes first, look different.
_FRAME = re.compile(r'(?:\[rank\d+\]: )?  File ".*", line \d+(?:, in .*)?$')
_TEXT = re.compile(r"\[rank\d+\]: \S|(?!\[rank\d+\]: )\S")
# The errors of Python, TensorFlow and torch for a lost rank (dl_comm._base.errors): 'rank 3 on h', or in a group
# 'rank 1 (rank 3 on h of the job)'.
_LOST = re.compile(r"(?:PeerLostError|dl_comm error -6): .*?\brank (?:\d+ \(rank )?(\d+)\b")


@dataclass(frozen=True)
class Outcome:
    """The exit status, the report (empty after success), and the rank that failed first, if known."""

    status: int
    text: str
    first: Rank | None = None


def outcome(
    ranks: Mapping[int, Rank], size: int | None, launcher: str, code: int, asked: int | None, hang: str = ""
) -> Outcome:
    """Determines the outcome of a job.

    Args:
        ranks: The ranks that connected.
        size: The number of ranks, if known.
        launcher: The launcher's name, for the text.
        code: Its exit status; negative: its signal.
        asked: The signal that stopped dl-comm-run, if any.
        hang: The rank that the others waited for in vain, if any, and what it did.
    """
    reported = sorted((rank for rank in ranks.values() if rank.order is not None), key=lambda rank: rank.order or 0)
    failed = [rank for rank in reported if _failed_on_its_own(rank)]
    status = 128 - code if code < 0 else code
    if asked:
        name = signal.Signals(asked).name
        return Outcome(128 + asked, f"stopped by {name}; {len(ranks)} rank(s) had started")
    if failed:
        first = _root_cause(failed[0], ranks)
        end = first.end or {}
        after = f", after {end['seconds']:.1f} s" if "seconds" in end else ""
        if hang:
            how = f"{why(failed[0])}{after}" if first is failed[0] else why(failed[0])
            lines = [f"{hang}; rank(s) {runs_text(rank.rank for rank in failed)} gave up then: {how}"]
            return Outcome(status_of(failed[0]), "\n".join(lines), first)
        lines = [f"{_name(first)} failed first{after}: {why(first)}", *_tail(first)]
        rest = [rank for rank in ranks.values() if rank not in failed and rank is not first]
        lines += _others(first, [rank for rank in failed if rank is not first], rest)
        own = status_of(first) if "seconds" in end else 0
        return Outcome(own or status_of(failed[0]), "\n".join(lines), first)
    # MPICH's launcher reports success if a rank exits with 0 before MPI_Finalize, and kills the others.
    cut_short = any(rank.end is None or rank.end.get("killed") for rank in ranks.values())
    if status == 0 and not cut_short:
        return Outcome(0, "")
    text = _no_failed_rank(list(ranks.values()), reported, size, f"{launcher} exited with status {status}")
    return Outcome(status or 1, "\n".join(text))


def why(rank: Rank) -> str:
    """How a rank ended, as text."""
    end = rank.end or {"killed": True}
    if end.get("killed"):
        return "stopped before its end"
    if not end["signal"]:
        return f"exit status {end['status']}"
    try:
        number = signal.Signals(end["signal"])
    except ValueError:  # a real-time signal
        return f"killed by signal {end['signal']}"
    hint = _HINTS.get(number, "")
    if number == signal.SIGKILL and end["oom"]:
        hint = "the system killed a process meanwhile because it was out of memory"
    return f"killed by {number.name} (signal {number.value})" + (f": {hint}" if hint else "")


def status_of(rank: Rank) -> int:
    """The exit status of a reported rank as a shell shows it."""
    end = rank.end or {}
    return 128 + int(end["signal"]) if end["signal"] else int(end["status"])


def _root_cause(rank: Rank, ranks: Mapping[int, Rank]) -> Rank:
    """The lost rank that made ``rank`` fail, from dl_comm's error in its output, or ``rank`` itself."""
    seen = [rank.rank]
    while match := _LOST.search("\n".join((rank.end or {}).get("tail", []))):
        lost = ranks.get(int(match[1]))
        if lost is None or lost.rank in seen:
            break
        rank = lost
        seen.append(lost.rank)
    return rank


def _failed_on_its_own(rank: Rank) -> bool:
    end = rank.end or {}
    return not end.get("killed") and not end.get("asked") and bool(end.get("status") or end.get("signal"))


def _name(rank: Rank) -> str:
    return f"rank {rank.rank} on {rank.host}"


def _tail(rank: Rank) -> list[str]:
    lines = _error(rank.end.get("tail", []) if rank.end else [])
    return ["its last lines:", *(f"  | {line}" for line in lines)] if lines else ["it has no output"]


def _error(lines: Sequence[str]) -> Sequence[str]:
    """The lines after those of a traceback, which stands above already: the standard error of all ranks is shown."""
    frames = [number for number, line in enumerate(lines) if _FRAME.match(line)]
    if not frames:
        return lines
    error = next((number for number in range(frames[-1] + 1, len(lines)) if _TEXT.match(lines[number])), 0)
    return lines[error:]


def _last(rank: Rank) -> tuple[str, str]:
    """A key that is equal for ranks with the same failure."""
    lines = (rank.end or {}).get("tail", [])
    return (lines[-1], "") if lines else ("", why(rank))


def _others(first: Rank, later: Sequence[Rank], rest: Sequence[Rank]) -> list[str]:
    # A stopped rank may have failed in the same way before it could exit.
    same = [rank.rank for rank in (*later, *rest) if _last(rank) == _last(first)]
    lines = [f"same failure on {len(same)} more: rank(s) {runs_text(same)}"] if same else []
    kinds: dict[str, list[int]] = {}
    for rank in later:
        if rank.rank not in same:
            kinds.setdefault(f"failed later: {why(rank)}", []).append(rank.rank)
    for rank in (rank for rank in rest if rank.rank not in same):
        done = rank.end and not rank.end.get("killed") and not rank.end.get("asked")
        kinds.setdefault("ended normally" if done else "were stopped then", []).append(rank.rank)
    return [*lines, *(f"rank(s) {runs_text(numbers)} {what}" for what, numbers in kinds.items())]


def _no_failed_rank(ranks: list[Rank], reported: list[Rank], size: int | None, what: str) -> list[str]:
    """The report without a failed rank: an MPI_Abort, a lost host, or a failed launcher."""
    if not ranks:
        return [f"{what} before any rank had started; see its output above"]
    aborted = [rank for rank in reported if any("MPI_Abort" in line for line in (rank.end or {}).get("tail", []))]
    if aborted:
        return [f"{_name(aborted[0])} called MPI_Abort; {what}", *_tail(aborted[0])]
    lines = [f"{what}, and no rank had failed before"]
    early = [
        rank.rank for rank in reported if (rank.end or {}).get("status") == 0 and not (rank.end or {}).get("asked")
    ]
    if early:
        lines.append(f"rank(s) {runs_text(early)} had ended with status 0 before the others")
    lost = [rank.rank for rank in ranks if rank.end is None]
    if lost:
        lines.append(
            f"rank(s) {runs_text(lost)} were lost without a report: a failed host, or all its processes were killed"
        )
    if size and len(ranks) < size:
        lines.append(f"rank(s) {runs_text(set(range(size)) - {rank.rank for rank in ranks})} never started")
    for rank in [rank for rank in reported if (rank.end or {}).get("tail")][:3]:
        lines += [f"{_name(rank)} was stopped", *_tail(rank)]
    return lines
