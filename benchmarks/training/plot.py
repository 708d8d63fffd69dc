"""Plots groups of bars for the models, one panel for each number of ranks, as PNG and SVG. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.plot import pyplot, save
from benchmarks.training.table import count_text

_COMPUTE = {"ours": "#9ecae1", "ddp": "#fdd0a2"}
_EXPOSED = {"ours": "#08519c", "ddp": "#e6550d"}
_WIDTH = 0.38


def draw(cases: Sequence[dict[str, Any]], title: str, path: Path) -> list[Path]:
    """Draws to `path` with the suffixes .png and .svg, and returns these paths.

    A bar is a contender's step, as a share of the step of independent processes; its upper part is exposed
    communication. Nothing is drawn where there is no step of independent processes. Raises ImportError without
    matplotlib.
    """
    plt = pyplot()
    shown = [case for case in cases if "step_ms" in case["results"].get("independent", {})]
    ranks = list(dict.fromkeys(case["ranks"] for case in shown))
    if not ranks:
        return []
    widest = max(sum(case["ranks"] == count for case in shown) for count in ranks)
    size = (max(7.5, 1.6 + 1.6 * widest), 1.2 + 2.7 * len(ranks))
    figure, panels = plt.subplots(len(ranks), 1, figsize=size, squeeze=False, layout="constrained")
    legend: dict[str, Any] = {}
    for panel, count in zip(panels[:, 0], ranks, strict=True):
        rows = [case for case in shown if case["ranks"] == count]
        for place, case in enumerate(rows):
            _group(panel, place, case, legend)
        panel.set_title(f"{count} ranks" if count > 1 else "1 rank", fontsize=11)
        labels = [f"{case['model']}\n{count_text(case['parameters'])} parameters" for case in rows]
        panel.set_xticks(range(len(rows)), labels, fontsize=8.5)
        panel.set_xlim(-0.6, widest - 0.4)
        panel.margins(y=0.22)
        panel.set_ylim(bottom=0)
        panel.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
        panel.axhline(1, color="0.35", linewidth=0.9, linestyle="--", zorder=3)
        panel.grid(axis="y", color="0.9", linewidth=0.7)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    figure.supylabel("step; 100 %: without communication", fontsize=10)
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=2, fontsize=9)
    figure.suptitle(
        f"{title}\nmedians in ms of a step, and of the exposed communication in it; line: quartiles", fontsize=10
    )
    return save(figure, path)


def _group(panel: Any, place: int, case: dict[str, Any], legend: dict[str, Any]) -> None:
    """The bars of a model: compute, and on top of it exposed communication."""
    whole = case["results"]["independent"]["step_ms"]
    drawn = {name: result for name, result in case["results"].items() if "exposed_ms" in result}
    for index, (name, result) in enumerate(drawn.items()):
        x = place + _WIDTH * (index - (len(drawn) - 1) / 2)
        step, exposed = result["step_ms"] / whole, result["exposed_ms"] / whole
        compute = step - max(0, exposed)
        what = result["what"]
        legend[f"{what}: compute"] = panel.bar(x, compute, 0.9 * _WIDTH, color=_COMPUTE[name])
        bar = panel.bar(x, step - compute, 0.9 * _WIDTH, bottom=compute, color=_EXPOSED[name])
        legend[f"{what}: exposed communication"] = bar
        low, high = (end / whole for end in result["quartiles_ms"])
        panel.plot([x, x], [low, high], color="black", linewidth=1.1, zorder=4)
        text = f"{_short(result['step_ms'])}\n({result['exposed_ms']:+.2g})"
        panel.annotate(text, (x, max(step, high, 1)), (0, 3), textcoords="offset points", ha="center", fontsize=8)


def _short(milliseconds: float) -> str:
    return f"{milliseconds:.1f}" if milliseconds < 100 else f"{milliseconds:.0f}"
