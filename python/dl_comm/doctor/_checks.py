"""A check: its name, its verdict, text for people and facts for programs. Plain data, sent as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["ok", "warn", "bad"]

GROUPS = ("build", "mpi", "frameworks", "host", "gpu", "ranks", "bandwidth")
"""The groups of a report, in order."""


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        group: One of ``GROUPS``.
        name: The checked subject, unique in its group and host.
        verdict: ``ok``; ``warn``: works, but slower or less reliably than possible; ``bad``: does not work.
        text: The result, and for ``warn`` and ``bad`` the fix.
        facts: The result for programs; JSON types only.
    """

    group: str
    name: str
    verdict: Verdict
    text: str
    facts: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The check as JSON types."""
        return dataclasses.asdict(self)


def worst(checks: Iterable[Check]) -> Verdict:
    """The worst verdict of the checks; ``ok`` without any."""
    found = {check.verdict for check in checks}
    return "bad" if "bad" in found else "warn" if "warn" in found else "ok"


def numbers_of(text: str) -> set[int]:
    """Parses Linux's lists of processors: ``0-3,8``."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers
