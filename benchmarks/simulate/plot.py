"""Plots as PNG and SVG. Needs matplotlib: ImportError without it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.allreduce.table import size_text
from benchmarks.simulate.cost import ALGORITHMS

_COLOURS = {"doubling": "#e6550d", "halving": "#3182bd", "pairwise": "#31a354", "ring": "#756bb1", "auto": "black"}
_MARKS = ("o", "^", "s", "v", "D", "x")
_CHOICES = (*ALGORITHMS, "auto")
_FAR = 20


def draw_hosts(rows: Sequence[dict[str, Any]], title: str, path: Path) -> list[Path]:
    """Seconds over the number of hosts, a line for each algorithm, a panel for each size: the rows of one network.

    A row has `name` and `bytes` of the size, `hosts`, `algorithm`, `seconds` and `limit_s`.
    """
    names = list(dict.fromkeys(row["name"] for row in rows))
    with _figure(2, -(-len(names) // 2), title, path, (11.5, 8.2)) as (panels, paths):
        for panel, name in zip(panels, names, strict=False):
            shown = sorted((row for row in rows if row["name"] == name), key=lambda row: int(row["hosts"]))
            for algorithm in _CHOICES:
                points = [(row["hosts"], row["seconds"]) for row in shown if row["algorithm"] == algorithm]
                # `auto` coincides with another algorithm: draw it thin, on top.
                style: dict[str, Any] = (
                    {"linewidth": 1.4, "linestyle": (0, (4, 2))} if algorithm == "auto" else {"linewidth": 2.6}
                )
                panel.plot(*zip(*points, strict=True), color=_COLOURS[algorithm], label=algorithm, **style)
            least = min(row["seconds"] for row in shown)
            limits = [(row["hosts"], row["limit_s"]) for row in shown if row["algorithm"] == "auto"]
            # For short calls the limit is far below and would compress the axis.
            if limits[-1][1] > least / _FAR:
                panel.plot(*zip(*limits, strict=True), color="0.55", linestyle=":", label="the least bytes on the wire")
            panel.set_title(f"{name} ({size_text(shown[0]['bytes'])})", fontsize=11)
            panel.set_xscale("log", base=2)
            hosts = sorted({row["hosts"] for row in shown if row["hosts"] & (row["hosts"] - 1) == 0})
            panel.set_xticks(hosts, [str(count) for count in hosts], fontsize=8)
            panel.set_xlabel("hosts")
            panel.set_ylabel("seconds of an average")
    return paths


def draw_check(rows: Sequence[dict[str, Any]], title: str, path: Path) -> list[Path]:
    """Measured over predicted, a panel for each rate and number of ranks a host; rows are those of `check.run`."""
    cases = list(dict.fromkeys((row["rate"], row["ranks"]) for row in rows))
    hosts = sorted({row["hosts"] for row in rows})
    columns = min(2, len(cases))
    lines = -(-len(cases) // columns)
    with _figure(columns, lines, title, path, (1 + 5.6 * columns, 1.4 + 4.4 * lines)) as (panels, paths):
        for panel, (rate, ranks) in zip(panels, cases, strict=False):
            shown = [row for row in rows if (row["rate"], row["ranks"]) == (rate, ranks)]
            for algorithm in _CHOICES:
                for count, mark in zip(hosts, _MARKS, strict=False):
                    found = [row for row in shown if (row["algorithm"], row["hosts"]) == (algorithm, count)]
                    if not found:
                        continue
                    x, middle, least = ([row[key] for row in found] for key in ("predicted_s", "median_s", "least_s"))
                    panel.vlines(x, least, middle, color=_COLOURS[algorithm], linewidth=0.8, alpha=0.6)
                    style = {"color": _COLOURS[algorithm], "marker": mark, "markersize": 5, "linestyle": ""}
                    panel.plot(x, middle, label=f"{algorithm}, {count} hosts", markerfacecolor="none", **style)
            seconds = [row[key] for row in shown for key in ("predicted_s", "median_s", "least_s")]
            ends = [min(seconds) / 1.5, max(seconds) * 1.5]
            panel.plot(ends, ends, color="0.55", linewidth=1, label="equal")
            panel.set_title(f"{rate}, {ranks} rank{'s' * (ranks > 1)} a host", fontsize=11)
            panel.set_xscale("log")
            panel.set_xlabel("predicted seconds")
            panel.set_ylabel("measured seconds: median, line down to the least")
    return paths


@contextmanager
def _figure(
    columns: int, rows: int, title: str, path: Path, size: tuple[float, float]
) -> Iterator[tuple[list[Any], list[Path]]]:
    """Yields empty panels and the paths to which the figure is then written."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    panels = list(grid.flat)
    paths = [path.with_suffix(".png"), path.with_suffix(".svg")]
    yield panels, paths
    legend: dict[str, Any] = {}
    for panel in panels:
        if not panel.lines:
            panel.set_visible(False)
            continue
        panel.set_yscale("log")
        panel.grid(which="major", color="0.9", linewidth=0.7)
        panel.set_axisbelow(True)
        handles, labels = panel.get_legend_handles_labels()
        legend.update(zip(labels, handles, strict=True))
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=6, fontsize=9)
    figure.suptitle(title, fontsize=10)
    for target in paths:
        figure.savefig(target, dpi=130)
    plt.close(figure)
