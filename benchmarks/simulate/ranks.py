"""Runs averages on ranks of this host, or of several network namespaces, and returns the times."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.simulate.cost import NetworkModel

sys.path.append(str(Path(__file__).parents[2] / "tests"))
# The test helpers that start ranks and create hosts.
from hosts import Hosts, possible  # noqa: E402
from launch import Finished, launch  # noqa: E402

__all__ = ["Failed", "Hosts", "Measured", "Result", "Trial", "on_hosts", "on_this_host", "possible"]

_SCRIPT = str(Path(__file__).parent / "run_allreduce.py")
_MARK = "results: "


class Failed(Exception):
    """The ranks failed; the text is their output."""


@dataclass(frozen=True)
class Trial:
    """Averages of one size: `warm` untimed and `calls` timed ones, each after `pause` seconds."""

    bytes: int
    warm: int
    calls: int
    pause: float = 0.0


@dataclass(frozen=True)
class Result:
    """The slowest rank's seconds for each call of a trial."""

    bytes: int
    seconds: list[float]


@dataclass(frozen=True)
class Measured:
    """The results of a job's trials, and the network that dl_comm measured (None on one host)."""

    results: list[Result]
    network: NetworkModel | None


def on_this_host(count: int, trials: Sequence[Trial], timeout: float = 120) -> Measured:
    """Runs the trials on `count` ranks of this host. Raises Failed."""
    return _read(launch(count, [sys.executable, _SCRIPT, _plan(trials)], timeout))


def on_hosts(hosts: Hosts, per_host: int, trials: Sequence[Trial], algorithm: str, timeout: float) -> Measured:
    """Runs the trials on `per_host` ranks of each host. Raises Failed."""
    settings = {"DL_COMM_ALGORITHM": algorithm}
    return _read(hosts.launch(per_host, [sys.executable, _SCRIPT, _plan(trials)], timeout, settings))


def _plan(trials: Sequence[Trial]) -> str:
    # Without blanks and quotes, because a remote shell parses it.
    return ",".join(f"{trial.bytes}:{trial.warm}:{trial.calls}:{trial.pause}" for trial in trials)


def _read(finished: Finished) -> Measured:
    found = re.search(rf"^{_MARK}(.*)$", finished.output, re.MULTILINE)
    if finished.returncode != 0 or not found:
        raise Failed(
            f"exit status {finished.returncode}{', timed out' * finished.timed_out}: {finished.output[-2000:]}"
        )
    results = json.loads(found[1])
    network = results["network"] and NetworkModel(
        *(results["network"][key] for key in ("latency_s", "per_message_s", "per_byte_s"))
    )
    return Measured([Result(**result) for result in results["results"]], network)
