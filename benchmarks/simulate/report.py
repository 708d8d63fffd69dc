"""Predictions for whole jobs as rows, and rows as tables for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import quantiles
from typing import Any

from benchmarks.allreduce.table import size_text
from benchmarks.simulate.cost import ALGORITHMS, NetworkModel
from benchmarks.simulate.model import Call, Host, JobSpec, limit, simulate

SIZES = {"short": 64, "medium": 64 << 10, "ResNet-50": 4 * 25_557_032, "BERT-base": 4 * 109_482_240}
"""Bytes by name; for models, the float32 gradients."""
HOSTS = (8, 64, 512, 4096, 8192)
CURVE = tuple(sorted({*(2**k for k in range(1, 14)), *(3 * 4**k for k in range(6))}))
"""Numbers of hosts for a plot: powers of two, and numbers in between."""


def predict(
    networks: Mapping[str, NetworkModel], hosts: Iterable[int], host: Host, ranks: int, in_place: bool = False
) -> list[dict[str, Any]]:
    """A row for each network, number of hosts, size and algorithm."""
    rows = []
    for network, constants in networks.items():
        for count in hosts:
            job = JobSpec(count, constants, host, ranks, in_place=in_place)
            for name, size in SIZES.items():
                call = Call(size)
                for algorithm in ("auto", *ALGORITHMS):
                    outcome = simulate(job, call, algorithm)
                    row = {"network": network, "hosts": count, "ranks": ranks, "name": name, "bytes": size}
                    row |= {"algorithm": algorithm, "seconds": outcome.seconds, "limit_s": limit(job, call)}
                    row |= {"chosen": dict(outcome.chunks), "sent": outcome.sent, "messages": outcome.messages}
                    rows.append(row)
    return rows


def prediction_table(rows: Sequence[dict[str, Any]], hosts: Iterable[int]) -> str:
    """The seconds of every algorithm, `auto`'s choice for most chunks, and its ratio to the limit."""
    cells = [["network", "hosts", "size", "bytes", "auto", *ALGORITHMS, "chosen", "of the limit"]]
    found = {(row["network"], row["hosts"], row["name"], row["algorithm"]): row for row in rows}
    for network in dict.fromkeys(row["network"] for row in rows):
        for name in SIZES:
            for count in hosts:
                auto = found[network, count, name, "auto"]
                times = [seconds_text(found[network, count, name, each]["seconds"]) for each in ("auto", *ALGORITHMS)]
                chosen = max(auto["chosen"], key=auto["chosen"].get)
                share = f"{100 * auto['limit_s'] / auto['seconds']:.1f} %"
                cells.append([network, str(count), name, size_text(SIZES[name]), *times, chosen, share])
    return _grid(cells)


def check_table(rows: Sequence[dict[str, Any]]) -> str:
    """Compares measured with predicted times."""
    cells = [["rate", "hosts", "ranks", "algorithm", "size", "predicted", "median", "least", "median/p.", "least/p."]]
    for row in rows:
        times = [row[key] for key in ("predicted_s", "median_s", "least_s")]
        head = [row["rate"], str(row["hosts"]), str(row["ranks"]), row["algorithm"], size_text(row["bytes"])]
        parts = [f"{time / times[0]:.2f}" for time in times[1:]]
        cells.append([*head, *map(seconds_text, times), *parts])
    return _grid(cells)


def ratio_table(rows: Sequence[dict[str, Any]]) -> str:
    """The quartiles of measured over predicted, by rate, ranks a host and size, and over all."""
    cells = [["rate", "ranks", "size", "calls", "median/p.: quartiles", "least/p.: quartiles"]]
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        for key in ((row["rate"], str(row["ranks"]), size_text(row["bytes"])), ("all", "", "")):
            groups.setdefault(key, []).append(row)
    for key in sorted(groups, key=lambda key: (key[0] == "all",)):
        found = groups[key]
        cells.append([*key, str(len(found)), *(_quartiles(found, kind) for kind in ("median_s", "least_s"))])
    return _grid(cells)


def _quartiles(rows: Sequence[dict[str, Any]], key: str) -> str:
    found = [row[key] / row["predicted_s"] for row in rows]
    return "  ".join(f"{value:.2f}" for value in (quantiles(found, n=4) if len(found) > 1 else found))


def seconds_text(seconds: float) -> str:
    """Seconds with three digits and a unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}" if seconds < 1000 * scale else f"{seconds / scale:.0f} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _grid(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
