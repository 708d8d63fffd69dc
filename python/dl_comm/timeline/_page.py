"""The report as one HTML file without scripts or external resources. Pure.

The element ``dl_comm-report`` has the numbers as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from dl_comm._base.text import size_text, time_text
from dl_comm.timeline import _charts
from dl_comm.timeline._recent import Row
from dl_comm.timeline._report import exposed_text

_OTHERS = "others"
_KINDS = {
    "exposed": "a caller waits (exposed)",
    "call": "call",
    "queue": "queue",
    "copy": "copy",
    "wait": "wait",
    "wait_for_rank": "wait for a rank",
    "reduce": "reduce",
    "network": "network",
}


def page(content: dict[str, Any], drawn: tuple[float, list[Row]], notes: Sequence[str]) -> str:
    """The page's text.

    Args:
        content: The result of ``_report.report``.
        drawn: The result of ``Recent.rows``.
        notes: Notes on skipped input.
    """
    whole, teams = content["all"], content["teams"]
    ranks = len(content["ranks"])
    title = f"dl_comm: {ranks} rank{'s' * (ranks != 1)}, {time_text(content['seconds'])}"
    style = files("dl_comm.timeline").joinpath("page.css").read_text(encoding="utf-8")
    parts = [
        f"<h1>{escape(title)}</h1>",
        *(f'<p class="note">{escape(note)}</p>' for note in notes),
        _tiles(whole),
        _table(content),
        _recent(drawn),
        _charts_of(whole, content["reference"]),
    ]
    several = [number for number in teams if int(number) >= 0]
    if len(several) > 1:
        for number in several:
            charts = _charts_of(teams[number], content["reference"])
            name = escape(_team(number, content["names"], "Team "))
            parts.append(f"<details><summary>{name}</summary>{charts}</details>")
    data = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style></head>\n<body><main>\n"
        + "\n".join(parts)
        + f'\n</main>\n<script type="application/json" id="dl_comm-report">{data}</script>\n</body></html>\n'
    )


def _tiles(view: dict[str, Any]) -> str:
    steps = view["steps"]
    late = view["last"][0] if view["last"] else None
    tiles = [
        (
            "step, median",
            time_text(steps["median_s"]),
            f"95 % below {time_text(steps['p95_s'])}; {steps['count']} steps",
        ),
        (
            "exposed a step",
            time_text(steps["exposed_most"] and steps["exposed_most"]["median_s"]),
            f"median of the rank that waits most; {exposed_text(steps)}",
        ),
        ("overlap", f"{view['overlap']:.0%}", "of the communication time is hidden"),
        (
            "straggler",
            f"rank {late['rank']}" if late else "–",
            f"last {late['times']} times, by {time_text(late['seconds'])} in total"
            if late
            else "one rank, or no calls",
        ),
    ]
    cells = (f"<div><b>{escape(n)}</b><strong>{escape(v)}</strong><span>{escape(w)}</span></div>" for n, v, w in tiles)
    return f'<section class="tiles">{"".join(cells)}</section>'


def _table(content: dict[str, Any]) -> str:
    head = ("team", "calls", "bytes", "step median", "95 %", "exposed a step", "exposed", "overlap")
    names, teams = content["names"], content["teams"]
    rows = [("all", content["all"]), *((_team(number, names), view) for number, view in teams.items())]
    lines = []
    for name, view in rows:
        steps, failed = view["steps"], f" ({view['failed']} failed)" if view["failed"] else ""
        cells = (
            name,
            f"{view['calls']}{failed}",
            size_text(view["bytes"]),
            time_text(steps["median_s"]),
            time_text(steps["p95_s"]),
            exposed_text(steps),
            time_text(view["exposed_s"]),
            "–" if name == _OTHERS else f"{view['overlap']:.0%}",
        )
        lines.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    stepping = _team(content["stepping"], names, "team ")
    note = (
        f"All: the teams and groups below but others; steps are those of {escape(stepping)}. Sums are over all ranks. "
    )
    note += "Others: broadcasts, barriers, metrics."
    return (
        f'<section class="wide"><table><thead><tr>{"".join(f"<th>{word}</th>" for word in head)}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table><p>{note}</p></section>"
    )


def _team(number: Any, names: dict[Any, str], before: str = "") -> str:
    """The number of a team after ``before``, or the name of another group."""
    return _OTHERS if int(number) < 0 else names.get(number, f"{before}{number}")


def _recent(drawn: tuple[float, list[Row]]) -> str:
    seconds, rows = drawn
    if not rows:
        return ""
    used = {span[0] for row in rows for span in row.spans}
    keys = _keys(**{kind: text for kind, text in _KINDS.items() if kind in used})
    return (
        f'<section class="wide"><h2>The last steps</h2>{keys}'
        f'<div class="scroll">{_charts.step_chart(seconds, rows)}</div></section>'
    )


def _keys(**text: str) -> str:
    items = "".join(f'<li><i class="{kind}"></i>{word}</li>' for kind, word in text.items())
    return f'<ul class="keys">{items}</ul>'


def _charts_of(view: dict[str, Any], reference: dict[str, Any]) -> str:
    steps, sizes, out = view["steps"], view["sizes"], []
    if steps["series"]:
        text = "The median of the ranks; a bar may stand for several steps." + _keys(
            exposed="exposed", step="rest", faint="longest"
        )
        out.append(("Time of a step", text, _charts.steps(steps)))
    if len(view["late"]["rows"]) > 1:
        text = "Of several missing ranks, the first one counts until it arrives, then the next."
        out.append(("Waits by rank", text, _charts.heat(view["late"])))
    if view["last"]:
        text = "The last rank to start a call, and its delay after the rank before, summed."
        out.append(("Last to arrive", text, _charts.last(view["last"])))
    if sizes:
        out.append(("Sizes of calls", "Calls of all ranks.", _charts.sizes(sizes)))
    if any(size["bytes"] for size in sizes):
        text = f"Bytes divided by the time from start to end, waits included. Line: {escape(reference['source'])}."
        text += _keys(reduce="all calls", faint="the best call")
        out.append(("Bandwidth of a rank", text, _charts.bandwidth(sizes, reference)))
    figures = (f"<figure><h2>{t}</h2>{chart}<figcaption>{w}</figcaption></figure>" for t, w, chart in out)
    return f'<section class="charts">{"".join(figures)}</section>'
