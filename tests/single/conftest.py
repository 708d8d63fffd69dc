"""For the tests that run once and start programs of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from launch import Finished, launch  # noqa: E402


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Finished]:
    """Runs Python text on some ranks: ``script(ranks, text, timeout=..., env=...)``."""

    def start(ranks: int, text: str, timeout: float = 60, env: dict[str, str] | None = None) -> Finished:
        path = tmp_path / "script.py"
        path.write_text(text)
        return launch(ranks, [sys.executable, str(path)], timeout, env)

    return start
