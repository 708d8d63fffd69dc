"""The charts of the report as SVG text; colours are CSS classes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from dl_comm._base.text import rate_text, size_text, time_text
from dl_comm.timeline._recent import Row

_WIDE, _HIGH = 400, 190
_LEFT, _BOTTOM, _TOP = 64, 30, 12


def _svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    body = "".join(parts)
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}">{body}</svg>'


def _rect(x: float, y: float, width: float, height: float, kind: str, text: str = "", extra: str = "") -> str:
    title = f"<title>{escape(text)}</title>" if text else ""
    where = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.4):.1f}" height="{max(height, 0):.1f}"'
    return f'<rect class="{kind}" {where}{extra}>{title}</rect>'


def _text(x: float, y: float, text: str, anchor: str = "middle", kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>'


def _line(x: float, y: float, to_x: float, to_y: float, kind: str) -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" class="{kind}"/>'


class _Axes:
    """The axes of a bar chart: ``count`` bars, up to value ``most``."""

    def __init__(self, count: int, most: float) -> None:
        self.most = most or 1.0
        self.step = (_WIDE - _LEFT - 6) / max(count, 1)
        self.floor = _HIGH - _BOTTOM

    def x(self, place: float) -> float:
        return _LEFT + place * self.step

    def y(self, value: float) -> float:
        return self.floor - (self.floor - _TOP) * value / self.most

    def bar(self, place: int, value: float, kind: str, text: str) -> str:
        gap = min(self.step * 0.15, 4)
        top = self.y(value)
        return _rect(self.x(place) + gap, top, self.step - 2 * gap, self.floor - top, kind, text)

    def frame(self, text: Any) -> list[str]:
        out = []
        for share in (0, 0.5, 1):
            y = self.y(self.most * share)
            out += [_line(_LEFT, y, _WIDE - 6, y, "grid"), _text(_LEFT - 5, y + 4, text(self.most * share), "end")]
        return out

    def labels(self, text: Sequence[str], every: int) -> list[str]:
        places = range(0, len(text), every)
        return [_text(self.x(place + 0.5), self.floor + 15, text[place]) for place in places]


def steps(content: dict[str, Any]) -> str:
    """Step times and exposed communication."""
    series, width = content["series"], content["width"]
    axes = _Axes(len(series), max(part["most_s"] for part in series))
    out = axes.frame(time_text)
    for place, part in enumerate(series):
        first, last = place * width + 1, min((place + 1) * width, content["count"])
        which = f"step {first}" if first == last else f"steps {first} to {last}"
        time, exposed, most = part["time_s"], part["exposed_s"], part["most_s"]
        text = f"{which}: {time_text(time)}, of which {time_text(exposed)} exposed; longest {time_text(most)}"
        out += [axes.bar(place, most, "faint", text), axes.bar(place, time, "step", text)]
        out.append(axes.bar(place, min(exposed, time), "exposed", text))
    out += [
        _text(axes.x(0), axes.floor + 15, "1", "start"),
        _text(_WIDE - 6, axes.floor + 15, str(content["count"]), "end"),
    ]
    out.append(_text((_LEFT + _WIDE) / 2, _HIGH - 2, "step"))
    return _svg(_WIDE, _HIGH, "time of the steps", out)


def heat(content: dict[str, Any]) -> str:
    """Heat map of waits: rows wait for columns."""
    rows, columns, seconds = content["rows"], content["columns"], content["seconds"]
    most = max((value for row in seconds for value in row), default=0.0) or 1.0
    left, top = 62.0, 44.0
    cell = min((_WIDE - left - 4) / len(columns), 60.0)
    tall = min(cell, 34.0)
    every = max(1, -(-13 // int(tall)))
    across = max(1, -(-max(7 * max(map(len, columns)), 12) // int(cell))) if cell < 60 else 1
    out = [
        _text(left, 14, "for rank", "start", "label"),
        _text(left - 6, 14, "waits", "end", "label"),
    ]
    out += [_text(left + (i + 0.5) * cell, top - 8, word) for i, word in enumerate(columns) if i % across == 0]
    out.append(_rect(left, top, len(columns) * cell - 1, len(rows) * tall - 1, "track"))
    for i, row in enumerate(seconds):
        y = top + i * tall
        if i % every == 0:
            out.append(_text(left - 6, y + tall / 2 + 4, rows[i], "end"))
        for j, value in enumerate(row):
            if value <= 0:
                continue
            text = f"rank {rows[i]} waited {time_text(value)} for {_waited_for(columns[j])}"
            opacity = f' style="fill-opacity:{value / most:.3f}"'
            out.append(_rect(left + j * cell, y, cell - 1, tall - 1, "heat", text, opacity))
            if cell > 44 and tall > 16:
                kind = "strong" if value > 0.7 * most else "label"
                out.append(_text(left + (j + 0.5) * cell, y + tall / 2 + 4, time_text(value), "middle", kind))
    return _svg(_WIDE, top + len(rows) * tall + 4, "waits by rank", out)


def _waited_for(column: str) -> str:
    return column if column.startswith("host") else f"rank {column}"


def last(rows: Sequence[dict[str, Any]]) -> str:
    """The ranks that arrived last."""
    shown = rows[:8]
    most = max(row["seconds"] for row in shown) or 1.0
    out = []
    for place, row in enumerate(shown):
        y = 6 + place * 24
        width = (_WIDE - 190) * row["seconds"] / most
        text = f"rank {row['rank']} was last {row['times']} times, {time_text(row['seconds'])} after the one before"
        out += [_text(62, y + 13, f"rank {row['rank']}", "end"), _rect(68, y, width, 18, "wait_for_rank", text)]
        out.append(_text(74 + width, y + 13, f"{time_text(row['seconds'])}, {row['times']} times", "start"))
    return _svg(_WIDE, 10 + 24 * len(shown), "last to arrive", out)


def sizes(rows: Sequence[dict[str, Any]]) -> str:
    """Number of calls by size."""
    axes = _Axes(len(rows), max(row["calls"] for row in rows))
    out = axes.frame(lambda value: f"{value:.0f}" if value >= 10 else f"{value:g}")
    out += [axes.bar(i, row["calls"], "step", f"{_class(row)}: {row['calls']} calls") for i, row in enumerate(rows)]
    return _svg(_WIDE, _HIGH, "sizes of calls", out + _classes(axes, rows))


def bandwidth(rows: Sequence[dict[str, Any]], reference: dict[str, Any]) -> str:
    """Bandwidth by call size, with the reference."""
    rows = [row for row in rows if row["bytes"]]
    axes = _Axes(len(rows), max([reference["rate"], *(row["best"] for row in rows)]) * 1.08)
    out = axes.frame(rate_text)
    for place, row in enumerate(rows):
        text = f"{_class(row)}: {rate_text(row['rate'])} on average, best call {rate_text(row['best'])}"
        out += [axes.bar(place, row["best"], "faint", text), axes.bar(place, row["rate"], "reduce", text)]
    y = axes.y(reference["rate"])
    name = "the machine's limit" if reference["measured"] else "best call"
    out += [
        _line(_LEFT, y, _WIDE - 6, y, "limit"),
        _text(_LEFT + 4, y + 13, f"{name}: {rate_text(reference['rate'])}", "start"),
    ]
    return _svg(_WIDE, _HIGH, "bandwidth", out + _classes(axes, rows))


def _classes(axes: _Axes, rows: Sequence[dict[str, Any]]) -> list[str]:
    every = max(1, round(46 / axes.step))
    labels = axes.labels([size_text(_upper(row)) for row in rows], every)
    return [*labels, _text((_LEFT + _WIDE) / 2, _HIGH - 2, "bytes of a call, up to")]


def _upper(row: dict[str, Any]) -> int:
    return 0 if row["exponent"] < 0 else int(2 ** row["exponent"])


def _class(row: dict[str, Any]) -> str:
    return "0 bytes" if row["exponent"] < 0 else f"up to {size_text(_upper(row))}"


def step_chart(seconds: float, rows: Sequence[Row]) -> str:
    """The activity of every rank in the last steps."""
    wide, left, tall = 1000.0, 92.0, 15.0
    scale = (wide - left - 8) / (seconds or 1.0)
    out: list[str] = []
    y, rank = 6.0, -1
    for row in rows:
        if row.rank != rank:
            y += 8 if rank >= 0 else 0
            rank = row.rank
            out.append(_text(4, y + 11, f"rank {rank}", "start", "label"))
        out.append(_text(left - 6, y + 11, row.name, "end"))
        out.append(_rect(left, y, wide - left - 8, tall - 2, "track"))
        for kind, low, high, text in row.spans:
            x, width = left + low * scale, (high - low) * scale
            title = f"{text or kind}: {time_text(high - low)}"
            out.append(_rect(x, y, width, tall - 2, kind, title))
            if kind == "wait_for_rank" and width > 90:
                out.append(_text(x + width / 2, y + 10.5, text, "middle", "strong"))
        y += tall
    for part in range(5):
        x = left + (wide - left - 8) * part / 4
        anchor = "end" if part == 4 else "middle" if part else "start"
        out += [_line(x, y, x, y + 4, "grid"), _text(x, y + 15, time_text(seconds * part / 4), anchor)]
    return _svg(wide, y + 21, "the last steps", out)
