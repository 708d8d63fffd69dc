"""Findings about a job, and their order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Most important first. Kinds before "straggler" are problems.
KINDS = (
    "lost",  # the process has ended or is stopped
    "no_response",  # a rank that others wait for has no dump
    "not_called",  # a rank runs user code while others wait for it
    "different_call",  # a rank waits in another call
    "stalled_in_call",  # a rank has the call and waits for no rank in it
    "failed",  # a team has failed
    "mismatch",  # calls did not match; the job continued
    "straggler",  # no rank hangs, but others wait long for this one
    "no_dump",  # the rank has no dump, and no rank waits for it
    "idle",
    "healthy",
)
PROBLEMS = KINDS[: KINDS.index("straggler")]


@dataclass(frozen=True)
class Finding:
    """A finding about ``ranks``; the ranks in ``waiting`` have waited ``seconds`` for them."""

    kind: str
    ranks: tuple[int, ...]
    text: str
    team: int | str | None = None
    call: str | None = None
    waiting: tuple[int, ...] = ()
    seconds: float | None = None

    @property
    def is_problem(self) -> bool:
        """Whether the exit status must be 1."""
        return self.kind in PROBLEMS


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Sorts findings by importance, then by waiting time."""
    return sorted(findings, key=lambda found: (KINDS.index(found.kind), -(found.seconds or 0.0), found.ranks))


def names(ranks: Sequence[int], most: int = 8) -> str:
    """``rank 3``, ``ranks 0, 1``, for many ``ranks 0, 1, 2, ... 63 (64 ranks)``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > most:
        return f"ranks {', '.join(map(str, ranks[: most - 1]))}, ... {ranks[-1]} ({len(ranks)} ranks)"
    return f"ranks {', '.join(map(str, ranks))}"
