"""Records how long each test takes, for the table at the end of the gate.

With ``DL_COMM_TEST_RECORD=FILE`` a run of pytest writes ``{test: [outcome, seconds, processor seconds]}`` there, as
JSON. Of a job's ranks only rank 0 does. Programs that the tests start do not inherit the variable.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

_CPU = "processor seconds"
_RANK = next((os.environ[name] for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "RANK") if name in os.environ), "0")


def pytest_configure(config: pytest.Config) -> None:
    """Starts the record, in the process that sees the reports of all tests."""
    file = os.environ.pop("DL_COMM_TEST_RECORD", None)
    if file is not None and _RANK == "0" and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Record(Path(file)))


def _processor_seconds() -> float:
    """Of this process and of those that it has started and waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _measured(item: pytest.Item) -> Iterator[None]:
    """Adds the processor time of a part of a test to its report."""
    before = _processor_seconds()
    try:
        return (yield)
    finally:
        item.user_properties.append((_CPU, _processor_seconds() - before))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    return (yield from _measured(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    return (yield from _measured(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """The time of programs that a fixture ends counts when it has waited for them."""
    return (yield from _measured(item))


class Record:
    """The results of a run, by test."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._tests: dict[str, list[str | float]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self._tests.setdefault(report.nodeid, ["passed", 0.0, 0.0])
        test[1] += report.duration
        if report.when == "teardown":
            test[2] = sum(seconds for name, seconds in report.user_properties if name == _CPU)
        if report.outcome != "passed":
            test[0] = report.outcome

    def pytest_sessionfinish(self) -> None:
        self._file.write_text(json.dumps(self._tests))
