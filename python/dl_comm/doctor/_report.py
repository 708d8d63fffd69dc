"""The report: text during the checks, or one JSON object at the end."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from dl_comm.doctor._checks import GROUPS, Check, worst

_MARKS = {"ok": "ok  ", "warn": "warn", "bad": "BAD "}


class Report:
    """Collects checks and prints them.

    Args:
        as_json: Whether to print one JSON object in ``end`` instead of text.
        prints: Whether this process prints; None: not known yet, checks are kept.
    """

    def __init__(self, as_json: bool, prints: bool | None) -> None:
        self.checks: list[Check] = []
        self._as_json = as_json
        self._prints = prints
        self._printed = 0
        self._group = ""

    def add(self, checks: Iterable[Check]) -> None:
        """Adds checks, and prints them if this process prints text."""
        self.checks += checks
        self._show()

    def set_prints(self, prints: bool) -> None:
        """Sets whether this process prints, and prints the kept checks."""
        self._prints = prints
        self._show()

    def _show(self) -> None:
        if self._as_json or not self._prints:
            return
        for check in self.checks[self._printed :]:
            if check.group != self._group:
                self._group = check.group
                print(self._group, flush=True)
            first, *more = check.text.split("\n")
            print(f"  {_MARKS[check.verdict]} {check.name}: {first}")
            for line in more:
                print(f"         {line}")
        self._printed = len(self.checks)

    def end(self, described: dict[str, Any], healthy: bool) -> None:
        """Prints the summary line, or the JSON object. ``healthy``: all ranks are healthy."""
        self._show()
        if not self._prints:
            return
        summary = self._summary(healthy)
        if not self._as_json:
            print(f"\n{summary}", flush=True)
            return
        groups = {group: [check.to_json() for check in self.checks if check.group == group] for group in GROUPS}
        print(json.dumps({"healthy": healthy, "summary": summary, "groups": groups, "process": described}), flush=True)

    def _summary(self, healthy: bool) -> str:
        for check in self.checks:
            if check.verdict == "bad":
                return f"NOT healthy; first: {check.group}, {check.name}: {check.text}"
        if not healthy:
            return "NOT healthy; another rank reported the problem above"
        warnings = sum(check.verdict == "warn" for check in self.checks)
        if worst(self.checks) == "ok":
            return "healthy"
        return f"healthy, with {warnings} warning{'s' * (warnings > 1)}"
