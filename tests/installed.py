"""What is installed, without an import: that takes seconds, in each process that collects tests."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest
from packaging.version import Version


def needs(*packages: str) -> None:
    """Skips the test module that calls it if a package is not installed, or as ``"keras>=3.0"`` in an older version."""
    missing = [package for package in packages if not _is_there(*package.split(">="))]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}", allow_module_level=True)


def _is_there(name: str, version: str = "0") -> bool:
    if importlib.util.find_spec(name) is None:
        return False
    return version == "0" or Version(importlib.metadata.version(name)) >= Version(version)
