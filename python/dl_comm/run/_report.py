"""What is said at the end: which rank failed first and why, its last lines, and how the others ended. Pure.

A rank that ended by itself comes before one that was stopped: when a rank fails, launchers stop the others by signals.
One that dl_comm reported of another's end comes after that other, which may take longer to end than to be missed.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dl_comm.run._listener import Rank

_HINTS = {
    signal.SIGABRT: "it called abort(), often after an assertion or an uncaught C++ exception",
    signal.SIGBUS: "often a full /dev/shm, or a file that was cut while mapped",
    signal.SIGILL: "often a library built for another processor",
    signal.SIGKILL: "somebody or the system killed it",
    signal.SIGXCPU: "its limit of processor time has passed",
}
# What Python, and TensorFlow's and torch's errors, say when another rank has ended (dl_comm._errors).
_LOST = re.compile(r"(?:PeerLostError|dl_comm error -6): .*?\brank (\d+)\b")


@dataclass(frozen=True)
class Outcome:
    """What to leave with, and what to say (nothing after a good end)."""

    status: int
    text: str


def outcome(ranks: Mapping[int, Rank], size: int | None, launcher: str, code: int, asked: int | None) -> Outcome:
    """Judges a job.

    Args:
        ranks: Those that spoke.
        size: How many there should be, if known.
        launcher: Its name, for the text.
        code: Its exit status; negative: the signal that ended it.
        asked: The signal with which dl-comm-run was asked to stop, if any.
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
        lines = [f"{_name(first)} failed first{after}: {why(first)}", *_tail(first)]
        rest = [rank for rank in ranks.values() if rank not in failed and rank is not first]
        lines += _others(first, [rank for rank in failed if rank is not first], rest)
        own = status_of(first) if "seconds" in end else 0
        return Outcome(own or status_of(failed[0]), "\n".join(lines))
    # MPICH's launcher calls it a success when a rank leaves with 0 before MPI's end, and kills the others.
    cut_short = any(rank.end is None or rank.end.get("killed") for rank in ranks.values())
    if status == 0 and not cut_short:
        return Outcome(0, "")
    text = _no_failed_rank(list(ranks.values()), reported, size, f"{launcher} ended with status {status}")
    return Outcome(status or 1, "\n".join(text))


def why(rank: Rank) -> str:
    """How a rank ended, in words."""
    end = rank.end or {"killed": True}
    if end.get("killed"):
        return "it was stopped before it had ended"
    if not end["signal"]:
        return f"exit status {end['status']}"
    try:
        number = signal.Signals(end["signal"])
    except ValueError:  # a real-time signal
        return f"killed by signal {end['signal']}"
    hint = _HINTS.get(number, "")
    if number == signal.SIGKILL and end["oom"]:
        hint = "the system killed a process for want of memory meanwhile"
    return f"killed by {number.name} (signal {number.value})" + (f": {hint}" if hint else "")


def spans(numbers: Iterable[int]) -> str:
    """``0, 2-4`` for 0, 2, 3, 4."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def status_of(rank: Rank) -> int:
    """The exit status that a shell would show for a rank that reported its end."""
    end = rank.end or {}
    return 128 + int(end["signal"]) if end["signal"] else int(end["status"])


def _root_cause(rank: Rank, ranks: Mapping[int, Rank]) -> Rank:
    """The rank whose end made ``rank`` fail, as dl_comm's error on it says, or ``rank`` itself."""
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
    lines: Sequence[str] = (rank.end or {}).get("tail", [])
    return ["its last lines:", *(f"  | {line}" for line in lines)] if lines else ["it had written nothing"]


def _last(rank: Rank) -> tuple[str, str]:
    """What two ranks that failed alike have in common."""
    lines = (rank.end or {}).get("tail", [])
    return (lines[-1], "") if lines else ("", why(rank))


def _others(first: Rank, later: Sequence[Rank], rest: Sequence[Rank]) -> list[str]:
    # One that was stopped may have failed in the same way, and not have come to its end.
    same = [rank.rank for rank in (*later, *rest) if _last(rank) == _last(first)]
    lines = [f"the same on {len(same)} more: rank(s) {spans(same)}"] if same else []
    kinds: dict[str, list[int]] = {}
    for rank in later:
        if rank.rank not in same:
            kinds.setdefault(f"failed later: {why(rank)}", []).append(rank.rank)
    for rank in (rank for rank in rest if rank.rank not in same):
        done = rank.end and not rank.end.get("killed") and not rank.end.get("asked")
        kinds.setdefault("had ended well" if done else "were stopped then", []).append(rank.rank)
    return [*lines, *(f"rank(s) {spans(numbers)} {what}" for what, numbers in kinds.items())]


def _no_failed_rank(ranks: list[Rank], reported: list[Rank], size: int | None, what: str) -> list[str]:
    """No rank is known to have failed by itself: an MPI_Abort, a host that was lost, a launcher that failed."""
    if not ranks:
        return [f"{what} before any rank had started; what it wrote stands above"]
    aborted = [rank for rank in reported if any("MPI_Abort" in line for line in (rank.end or {}).get("tail", []))]
    if aborted:
        return [f"{_name(aborted[0])} called MPI_Abort; {what}", *_tail(aborted[0])]
    lines = [f"{what}, and no rank had failed by itself before"]
    early = [
        rank.rank for rank in reported if (rank.end or {}).get("status") == 0 and not (rank.end or {}).get("asked")
    ]
    if early:
        lines.append(f"rank(s) {spans(early)} had ended with status 0 before the others")
    lost = [rank.rank for rank in ranks if rank.end is None]
    if lost:
        lines.append(f"rank(s) {spans(lost)} were lost without a word: a host that failed, or all its processes killed")
    if size and len(ranks) < size:
        lines.append(f"rank(s) {spans(set(range(size)) - {rank.rank for rank in ranks})} never started")
    for rank in [rank for rank in reported if (rank.end or {}).get("tail")][:3]:
        lines += [f"{_name(rank)} was stopped", *_tail(rank)]
    return lines
