"""Records the results of a rank's calls in a file for the test."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Observations:
    """Writes the result of each case to ``file``: ``{case: {"error": ..., "text": ..., "seconds": ...}}``."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._results: dict[str, dict[str, Any]] = {}

    def record(self, case: str, call: Callable[[], Any]) -> None:
        """Runs ``call`` and records its error, if any, and its time."""
        start = time.monotonic()
        error = text = ""
        try:
            call()
        except Exception as raised:  # noqa: BLE001 - recorded
            error, text = type(raised).__name__, str(raised)
        self._results[case] = {"error": error, "text": text, "seconds": time.monotonic() - start}
        # Replace the file atomically: this rank may be killed at any time.
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps(self._results))
        partial.replace(self._file)
