"""Plots time over size, one panel for each number of ranks, as PNG and SVG. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.allreduce.contenders import CONTENDERS
from benchmarks.allreduce.table import names, size_text
from benchmarks.common.plot import pyplot, save

# A family of contenders has a hue, each member a marker; ours are blue and green.
_STYLES: dict[str, dict[str, Any]] = {
    "limit": {"color": "black", "linestyle": "--", "linewidth": 1.8},
    "copy": {"color": "0.6", "linestyle": ":", "linewidth": 1.8},
    "core": {"color": "#08519c", "marker": "o"},
    "core-shared": {"color": "#6baed6", "marker": "o", "markerfacecolor": "white"},
    "numpy": {"color": "#807dba", "marker": "s"},
    "numpy-inplace": {"color": "#54278f", "marker": "s"},
    "numpy-shared": {"color": "#bcbddc", "marker": "s", "markerfacecolor": "white"},
    "torch": {"color": "#31a354", "marker": "^"},
    "torch-inplace": {"color": "#006d2c", "marker": "v"},
    "gloo": {"color": "#e6550d", "marker": "x"},
    "deepspeed": {"color": "#31a354", "marker": "+"},
    "mpich": {"color": "#a50f15", "marker": "+"},
    "mpich-mpi4py": {"color": "#fb6a4a", "marker": "1"},
    "openmpi": {"color": "#6a51a3", "marker": "+"},
    "openmpi-mpi4py": {"color": "#9e9ac8", "marker": "1"},
}
_WIDTHS = {"ours": 1.8, "peer": 1.1, "limit": 1.8, "copy": 1.8}


def draw(cases: Sequence[dict[str, Any]], dtype: str, title: str, path: Path) -> list[Path]:
    """Draws the single buffers of one type to `path` with the suffixes .png and .svg, and returns these paths.

    Raises ImportError without matplotlib. Returns nothing with fewer than two sizes.
    """
    plt = pyplot()
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    shown = [case for case in cases if case["kind"] == "buffer" and case["dtype"] == dtype]
    ranks = list(dict.fromkeys(case["ranks"] for case in shown))
    sizes = sorted({case["bytes"] for case in shown})
    if len(sizes) < 2:
        return []
    figure, panels = plt.subplots(
        1, len(ranks), figsize=(1.5 + 4.8 * len(ranks), 6.4), sharey=True, squeeze=False, layout="constrained"
    )
    legend = {}
    for panel, count in zip(panels[0], ranks, strict=True):
        rows = sorted((case for case in shown if case["ranks"] == count), key=lambda case: int(case["bytes"]))
        for contender in CONTENDERS:
            if contender.name not in names(rows):
                continue
            found = [
                (case["bytes"], result["median_us"], *result["quartiles_us"])
                for case in rows
                if "median_us" in (result := case["results"].get(contender.name, {}))
            ]
            x, y, low, high = zip(*found, strict=True)
            style = {"linewidth": _WIDTHS[contender.group], "markersize": 5, **_STYLES.get(contender.name, {})}
            (line,) = panel.plot(x, y, label=contender.what, zorder=3 if contender.group != "peer" else 2, **style)
            panel.fill_between(x, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
            legend[contender.what] = line
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(sizes, [size_text(size) for size in sizes], rotation=55, ha="right", fontsize=8)
        panel.xaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_major_locator(LogLocator(numticks=20))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _time_text(value)))
        panel.grid(which="major", color="0.88", linewidth=0.7)
        panel.set_axisbelow(True)
        panel.set_title(f"{count} ranks", fontsize=11)
        panel.set_xlabel(f"size of the buffer ({dtype})")
    panels[0][0].set_ylabel("time of an average, slowest rank: median, shade: quartiles")
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=min(4, 2 * len(ranks)), fontsize=9)
    figure.suptitle(title, fontsize=10)
    return save(figure, path)


def _time_text(microseconds: float) -> str:
    for unit, scale in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= scale:
            return f"{microseconds / scale:g} {unit}"
    return f"{microseconds:g} µs"
