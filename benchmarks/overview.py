"""Draws README's figure from results of `benchmarks.allreduce` and `benchmarks.training`. Needs matplotlib.

    python -m benchmarks.overview RESULTS [RESULTS ...] [--ranks N] [--out docs/performance]

RESULTS are `allreduce.json`, `training.json`, or folders that have them; of two files of a kind the last one counts.
The left panel has the time of an allreduce of float32 over the size of the buffer, for dl_comm, gloo, DeepSpeed (in
shared memory), MPICH and Open MPI. The right one has the time of training steps, split into computation and exposed
communication, for dl_comm and its peers. `overview-light.svg` and `overview-dark.svg` differ in their colours only.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.allreduce.table import size_text
from benchmarks.common.plot import pyplot

Case = dict[str, Any]


@dataclass(frozen=True)
class Theme:
    """Colours of a figure with a transparent background."""

    name: str
    text: str
    faint: str
    ours: str
    compute: str
    peers: tuple[str, ...]


THEMES = (
    Theme("light", "#1f2328", "#d1d9e0", "#0969da", "#b6bfc9", ("#cf222e", "#1a7f37", "#bc4c00", "#8250df")),
    Theme("dark", "#e6edf3", "#3d444d", "#58a6ff", "#59636e", ("#ff7b72", "#56d364", "#f0883e", "#bc8cff")),
)

# The contenders of an allreduce, ours first: the fastest of these names counts.
ALLREDUCE = {
    "dl_comm": ("core", "numpy-inplace", "torch-inplace"),
    "gloo": ("gloo",),
    "DeepSpeed": ("deepspeed",),
    "MPICH": ("mpich", "mpich-mpi4py"),
    "Open MPI": ("openmpi", "openmpi-mpi4py"),
}
TRAINING = {"ours": "dl_comm", "ddp": "DDP on gloo"}
MODELS = {
    "mlp": "MLP",
    "resnet": "ResNet",
    "transformer-3m": "transformer, 3 M",
    "transformer-29m": "transformer, 29 M",
}
MOST_MODELS = 3


def load(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """The reports by kind, "allreduce" and "training". Raises ValueError for a file that is neither."""
    reports: dict[str, dict[str, Any]] = {}
    for path in paths:
        files = [path / f"{kind}.json" for kind in ("allreduce", "training")] if path.is_dir() else [path]
        for file in files:
            if path.is_dir() and not file.exists():
                continue
            report = json.loads(file.read_text())
            cases = report.get("cases") or [{}]
            kind = "training" if "model" in cases[0] else "allreduce" if "kind" in cases[0] else ""
            if not kind:
                raise ValueError(f"{file} has no results of benchmarks.allreduce or benchmarks.training")
            reports[kind] = report
    if missing := {"allreduce", "training"} - set(reports):
        raise ValueError(f"no results of {' and '.join(f'benchmarks.{kind}' for kind in sorted(missing))}")
    return reports


def allreduce_lines(cases: Sequence[Case], ranks: int) -> dict[str, list[tuple[int, float]]]:
    """Sizes and medians in microseconds of each library that was measured."""
    shown = [case for case in cases if (case["kind"], case["dtype"], case["ranks"]) == ("buffer", "f32", ranks)]
    lines = {}
    for library, names in ALLREDUCE.items():
        points = []
        for case in sorted(shown, key=lambda case: int(case["bytes"])):
            found = [case["results"][name] for name in names if "median_us" in case["results"].get(name, {})]
            if found:
                points.append((int(case["bytes"]), min(float(result["median_us"]) for result in found)))
        if points:
            lines[library] = points
    return lines


def training_bars(cases: Sequence[Case], ranks: int) -> list[tuple[str, list[tuple[str, float, float]]]]:
    """Models with their bars: contender, milliseconds of a step, and exposed communication in it.

    Models that a peer trains too, the ones with the longest steps.
    """
    found = []
    for case in cases:
        results = {name: case["results"].get(name, {}) for name in TRAINING}
        if case["ranks"] == ranks and all("exposed_ms" in result for result in results.values()):
            bars = [(TRAINING[name], float(r["step_ms"]), float(r["exposed_ms"])) for name, r in results.items()]
            found.append((MODELS.get(case["model"], case["model"]), bars))
    return sorted(found, key=lambda model: model[1][0][1])[-MOST_MODELS:]


def draw(reports: dict[str, dict[str, Any]], ranks: int, theme: Theme, path: Path) -> None:
    """Draws the figure to `path`.

    Raises ValueError without results of that number of ranks, ImportError without matplotlib.
    """
    plt = pyplot()
    lines = allreduce_lines(reports["allreduce"]["cases"], ranks)
    bars = training_bars(reports["training"]["cases"], ranks)
    if "dl_comm" not in lines or not bars:
        raise ValueError(f"the results of {ranks} ranks lack dl_comm, or training steps of a peer")
    style = {"text.color": theme.text, "axes.labelcolor": theme.text, "xtick.color": theme.text}
    style |= {"ytick.color": theme.text, "axes.edgecolor": theme.faint, "font.size": 10, "svg.hashsalt": "dl_comm"}
    with plt.rc_context(style):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(10.4, 3.9), width_ratios=(1.1, 1), layout="constrained", facecolor="none"
        )
        figure.get_layout_engine().set(wspace=0.08)
        _draw_lines(left, lines, ranks, theme)
        _draw_bars(right, bars, ranks, theme)
        for panel in (left, right):
            panel.set_facecolor("none")
            panel.set_axisbelow(True)
            panel.spines[["top", "right"]].set_visible(False)
            panel.tick_params(length=0)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def _draw_lines(panel: Any, lines: dict[str, list[tuple[int, float]]], ranks: int, theme: Theme) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    peers = iter(theme.peers)
    ends = []
    for library, points in lines.items():
        ours = library == "dl_comm"
        color = theme.ours if ours else next(peers)
        sizes, times = zip(*points, strict=True)
        panel.plot(sizes, times, color=color, linewidth=2.6 if ours else 1.5, marker="o", markersize=4.5 if ours else 3)
        ends.append((times[-1], library, color, sizes[-1]))
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    sizes = sorted({size for points in lines.values() for size, _ in points})
    panel.set_xlim(sizes[0] / 1.5, sizes[-1] * (sizes[-1] / sizes[0]) ** 0.3)
    _label_ends(panel, ends)
    shown = sizes if len(sizes) <= 5 else sizes[:: -(-len(sizes) // 5)]
    panel.set_xticks(shown, [size_text(size) for size in shown])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _time_text(value)))
    panel.grid(color=theme.faint, linewidth=0.6)
    panel.set_title(f"Allreduce, {ranks} ranks on one host", loc="left", fontsize=11, fontweight="bold")


def _label_ends(panel: Any, ends: list[tuple[float, str, str, int]]) -> None:
    """Names the lines at their right ends, at least a line of text apart."""
    low, high = panel.get_ylim()
    high *= (high / low) ** 0.1
    panel.set_ylim(low, high)
    apart = (high / low) ** 0.07
    last = 0.0
    for time, library, color, size in sorted(ends):
        last = max(time, last * apart)
        weight = "bold" if library == "dl_comm" else "normal"
        place = {"textcoords": "offset points", "va": "center", "color": color, "fontweight": weight}
        panel.annotate(library, (size, last), (9, 0), annotation_clip=False, **place)


def _draw_bars(panel: Any, models: list[tuple[str, list[tuple[str, float, float]]]], ranks: int, theme: Theme) -> None:
    colors = dict(zip(TRAINING.values(), (theme.ours, theme.peers[0]), strict=True))
    longest = 0.0
    ticks = []
    place = 0.0
    for model, bars in models:
        without = bars[0][1] - bars[0][2]
        for contender, step, exposed in bars:
            # A share of our step without communication, so that models of any size fit into one panel.
            whole, compute = step / without, (step - max(0.0, exposed)) / without
            panel.barh(place, compute, 0.78, color=theme.compute)
            panel.barh(place, whole - compute, 0.78, left=compute, color=colors[contender])
            text = f"{_number(step)} ms"
            panel.annotate(text, (whole, place), (5, 0), textcoords="offset points", va="center", fontsize=9)
            ticks.append((place, f"{model}\n{contender}" if contender == bars[0][0] else contender))
            longest = max(longest, whole)
            place += 1
        place += 0.7
    panel.set_yticks([at for at, _ in ticks], [text for _, text in ticks], fontsize=9)
    panel.invert_yaxis()
    panel.set_xlim(0, 1.16 * longest)
    panel.set_xticks([])
    panel.spines["bottom"].set_visible(False)
    panel.set_title(f"Step of training, {ranks} ranks", loc="left", fontsize=11, fontweight="bold")
    panel.set_xlabel("grey: computation; colour: communication that it does not hide", fontsize=9)


def _number(milliseconds: float) -> str:
    return f"{milliseconds:.1f}" if milliseconds < 100 else f"{milliseconds:.0f}"


def _time_text(microseconds: float) -> str:
    for unit, scale in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= scale:
            return f"{microseconds / scale:g} {unit}"
    return f"{microseconds:g} µs"


def main(words: Sequence[str] | None = None) -> int:
    """Writes both figures and prints their paths; 1 with a message if the results do not suffice."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overview",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", nargs="+", type=Path, help="files or folders of results")
    parser.add_argument("--ranks", type=int, default=2, help="the number of ranks that is shown (2)")
    parser.add_argument("--out", type=Path, default=Path("docs/performance"), help="folder (docs/performance)")
    options = parser.parse_args(words)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        reports = load(options.results)
        for theme in THEMES:
            path = options.out / f"overview-{theme.name}.svg"
            draw(reports, options.ranks, theme, path)
            print(path)
    except (ValueError, OSError, ImportError) as error:
        print(f"no figure: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
