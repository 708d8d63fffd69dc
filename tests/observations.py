"""What a rank of a fault test sees, in a file that the test reads."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Observations:
    """Notes into ``file`` what came of each case: ``{case: {"error": ..., "text": ..., "seconds": ...}}``."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._results: dict[str, dict[str, Any]] = {}

    def record(self, case: str, call: Callable[[], Any]) -> None:
        """Runs ``call`` and notes what came of it, and when: an error, or that there was none."""
        start = time.monotonic()
        error = text = ""
        try:
            call()
        except Exception as raised:  # noqa: BLE001 - to be told
            error, text = type(raised).__name__, str(raised)
        self._results[case] = {"error": error, "text": text, "seconds": time.monotonic() - start}
        # All or nothing: this rank may be killed at any time.
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps(self._results))
        partial.replace(self._file)
