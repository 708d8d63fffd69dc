"""Makes the test helpers importable, and leaves the frameworks between hosts to tests/heavy.sh."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Between hosts, the gate runs the NumPy binding only: all bindings share the code of the network."""
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if parameters.get("there") == "two hosts" and parameters.get("binding") != "numpy":
            item.add_marker(pytest.mark.heavy)
