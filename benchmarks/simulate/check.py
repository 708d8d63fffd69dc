"""Compares the simulation with measurements on network namespaces with capped links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks.simulate.cost import ALGORITHMS, NetworkModel
from benchmarks.simulate.model import Call, Host, JobSpec, simulate
from benchmarks.simulate.ranks import Failed, Hosts, Measured, Trial, on_hosts

SIZES = (64, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
CHOICES = ("auto", *ALGORITHMS)
_SECONDS = 1.5
_MAX_CALLS = 100
_MIN_CALLS = 5
_MAX_SECONDS = 3.0
# tc counts Ethernet frames; with TCP time stamps, 1448 of 1514 bytes are data.
_FRAMES = 1514 / 1448
# Bytes that an idle link sends at once before its cap applies (`tests/hosts.py`). The links idle before each call, so
# that all calls start with a full bucket.
_BURST = 256 << 10


@dataclass(frozen=True)
class Case:
    """A number of hosts and ranks, and the rate of the links."""

    rate: str
    hosts: int
    ranks: int


def byte_seconds(rate: str) -> float:
    """The time of a byte of data on a link that tc caps at `rate` (100mbit, 1gbit). ValueError without a unit."""
    for unit, bits in (("mbit", 1e6), ("gbit", 1e9)):
        if rate.endswith(unit):
            return 8 / (float(rate.removesuffix(unit)) * bits) * _FRAMES
    raise ValueError(f"invalid rate: {rate!r} (expected for example 100mbit or 1gbit)")


def run(case: Case, sizes: Sequence[int], host: Host) -> tuple[list[dict[str, Any]], list[str]]:
    """Measures and predicts a case with every algorithm; returns rows and error texts.

    Sizes that take seconds a call are skipped.
    """
    guess = NetworkModel(200e-6, 20e-6, byte_seconds(case.rate))
    measured: dict[str, Measured] = {}
    failures = []
    with Hosts(case.hosts, case.rate) as hosts:
        for algorithm in CHOICES:
            trials = _trials(case, sizes, guess, host, algorithm)
            try:
                measured[algorithm] = on_hosts(hosts, case.ranks, trials, algorithm, timeout=300)
            except Failed as error:
                failures.append(f"{case} {algorithm}: {error}")
    probes = [results.network for results in measured.values() if results.network]
    if not probes:
        return [], failures
    latency, message, byte = (
        median(getattr(probe, key) for probe in probes) for key in ("latency_s", "message_gap_s", "byte_s")
    )
    network = NetworkModel(latency, message, guess.byte_s)
    rows = []
    for algorithm, results in measured.items():
        for result in results.results:
            outcome = simulate(_job(case, network, host), Call(result.bytes), algorithm)
            row = {**asdict(case), "bytes": result.bytes, "algorithm": algorithm, "chosen": dict(outcome.chunks)}
            row |= {"predicted_s": outcome.seconds, "median_s": median(result.seconds), "least_s": min(result.seconds)}
            row |= {"calls": len(result.seconds), "network": asdict(network), "probed_byte": byte}
            rows.append(row)
    return rows, failures


def _trials(case: Case, sizes: Sequence[int], guess: NetworkModel, host: Host, algorithm: str) -> list[Trial]:
    trials = []
    for size in sizes:
        outcome = simulate(_job(case, guess, host), Call(size), algorithm)
        if outcome.seconds > _MAX_SECONDS and size > sizes[0]:
            continue
        pause = 1.2 * _BURST * guess.byte_s
        calls = int(min(max(_SECONDS / (outcome.seconds + pause), _MIN_CALLS), _MAX_CALLS))
        trials.append(Trial(size, 2 if outcome.seconds < _SECONDS / 4 else 1, calls, pause))
    return trials


def _job(case: Case, network: NetworkModel, host: Host) -> JobSpec:
    return JobSpec(case.hosts, network, host, case.ranks, burst=_BURST)
