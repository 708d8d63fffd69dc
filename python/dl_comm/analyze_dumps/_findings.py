"""What there is to say about a job, and in which order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Most important first. Those before "straggler" name somebody to blame.
KINDS = (
    "lost",  # a process is lost
    "no_response",  # a rank that others wait for has written nothing
    "not_called",  # a rank is in its own code while others wait for it
    "different_call",  # a rank waits in another call
    "stalled_in_call",  # a rank has the call, and is not through
    "failed",  # a team has failed
    "mismatch",  # calls that did not match; the job went on
    "straggler",  # nobody hangs, but others wait much for one rank
    "no_dump",  # nobody waits for the rank, and it has written nothing
    "idle",
    "healthy",
)
PROBLEMS = KINDS[: KINDS.index("straggler")]


@dataclass(frozen=True)
class Finding:
    """One thing to say. ``ranks`` are those to blame, ``waiting`` those who wait for them, for ``seconds``."""

    kind: str
    ranks: tuple[int, ...]
    text: str
    team: int | None = None
    call: str | None = None
    waiting: tuple[int, ...] = ()
    seconds: float | None = None

    @property
    def is_problem(self) -> bool:
        """Whether something is wrong."""
        return self.kind in PROBLEMS


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Most important first; of one kind, whom others wait for longest."""
    return sorted(findings, key=lambda found: (KINDS.index(found.kind), -(found.seconds or 0.0), found.ranks))


def names(ranks: Sequence[int], most: int = 8) -> str:
    """``rank 3``, ``ranks 0, 1``, and of many ``ranks 0, 1, 2, ... 63 (64 ranks)``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > most:
        return f"ranks {', '.join(map(str, ranks[: most - 1]))}, ... {ranks[-1]} ({len(ranks)} ranks)"
    return f"ranks {', '.join(map(str, ranks))}"


def time_text(seconds: float) -> str:
    """``0.25 s``, ``62 s``, ``12 min``."""
    if seconds >= 600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{max(seconds, 0):.2g} s"
