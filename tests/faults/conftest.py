"""Leaves most faults of the frameworks to tests/heavy.sh."""

from __future__ import annotations

import pytest

# What the gate runs with a framework, on one host: an error of each class.
OF_FRAMEWORKS = ("test_mismatched_calls", "test_a_lost_rank", "test_a_rank_that_misses_the_deadline")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The gate runs all faults with the NumPy binding: the bindings differ in how they report an error only."""
    for item in items:
        if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            continue
        parameters = item.callspec.params
        if parameters.get("binding", "numpy") == "numpy":
            continue
        in_gate = item.originalname in OF_FRAMEWORKS and parameters.get("case", "sigkill") == "sigkill"
        if parameters.get("there") == "two hosts" or not in_gate:
            item.add_marker(pytest.mark.heavy)
