"""Runs averages on ranks, on this host or on several of network namespaces, and brings the times home."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.simulate.cost import NetworkModel

sys.path.append(str(Path(__file__).parents[2] / "tests"))
# The project's one way to start ranks, and its one way to make hosts.
from hosts import Hosts, possible  # noqa: E402
from launch import Finished, launch  # noqa: E402

__all__ = ["Failed", "Hosts", "Measured", "Result", "Trial", "on_hosts", "on_this_host", "possible"]

_SCRIPT = str(Path(__file__).parent / "run_allreduce.py")
_MARK = "results: "


class Failed(Exception):
    """The ranks did not end as they should; the text is what they printed."""


@dataclass(frozen=True)
class Trial:
    """Averages of one size: `warm` that do not count, then `calls` that do, each after a pause of so many seconds."""

    bytes: int
    warm: int
    calls: int
    pause: float = 0.0


@dataclass(frozen=True)
class Result:
    """The seconds of the calls of a trial, each the slowest rank's."""

    bytes: int
    seconds: list[float]


@dataclass(frozen=True)
class Measured:
    """The results of a job's trials, and the network that dl_comm measured (None on one host)."""

    results: list[Result]
    network: NetworkModel | None


def on_this_host(count: int, trials: Sequence[Trial], timeout: float = 120) -> Measured:
    """The trials on `count` ranks here. Raises Failed."""
    return _read(launch(count, [sys.executable, _SCRIPT, _plan(trials)], timeout))


def on_hosts(hosts: Hosts, per_host: int, trials: Sequence[Trial], algorithm: str, timeout: float) -> Measured:
    """The trials on `per_host` ranks of each of the hosts. Raises Failed."""
    settings = {"DL_COMM_ALGORITHM": algorithm}
    return _read(hosts.launch(per_host, [sys.executable, _SCRIPT, _plan(trials)], timeout, settings))


def _plan(trials: Sequence[Trial]) -> str:
    # Without blanks and quotes, which a shell on the way would take.
    return ",".join(f"{trial.bytes}:{trial.warm}:{trial.calls}:{trial.pause}" for trial in trials)


def _read(finished: Finished) -> Measured:
    found = re.search(rf"^{_MARK}(.*)$", finished.output, re.MULTILINE)
    if finished.returncode != 0 or not found:
        raise Failed(
            f"exit status {finished.returncode}{', time is up' * finished.timed_out}: {finished.output[-2000:]}"
        )
    results = json.loads(found[1])
    network = results["network"] and NetworkModel(
        *(results["network"][key] for key in ("latency_s", "message_s", "byte_s"))
    )
    return Measured([Result(**result) for result in results["results"]], network)
