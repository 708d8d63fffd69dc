"""What is installed, without an import: that takes seconds, in each process that collects tests."""

from __future__ import annotations

import importlib.util

import pytest


def needs(*packages: str) -> None:
    """Skips the test module that calls it if a package is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}", allow_module_level=True)
