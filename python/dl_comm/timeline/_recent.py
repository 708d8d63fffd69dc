"""Selects the spans of the last few steps for the chart; their number does not depend on the size of the job."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any

from dl_comm.timeline._files import Event
from dl_comm.timeline._metrics import TraceMetrics

_KEPT = 6000  # events kept for each rank
_STEPS = 3
_RANKS = 8
_THREADS = 2
_COLUMNS = 900  # of the chart


@dataclass(frozen=True)
class Row:
    """A row of the chart: spans of kind, begin, end (seconds from the start of the chart) and text."""

    rank: int
    name: str
    spans: tuple[tuple[str, float, float, str], ...]


class Recent:
    """Keeps the last events of each rank; add the events of all files with :meth:`add`."""

    def __init__(self) -> None:
        self._events: dict[int, deque[Event]] = defaultdict(lambda: deque(maxlen=_KEPT))

    def add(self, event: Event) -> None:
        """Keeps a span."""
        if event["ph"] == "X" and event["cat"] != "step":
            self._events[event["pid"]].append(event)

    def window(self, metrics: TraceMetrics, stepping: int) -> tuple[float, float]:
        """Begin and end of the chart: the last steps of the first rank with steps; microseconds."""
        steps = next((own for own in metrics.teams[stepping].steps.values() if own), [])
        low, high = (max(edge) for edge in zip(*metrics.ranges.values(), strict=True))
        if len(steps) > 1:
            low, high = sorted(steps)[-min(_STEPS + 1, len(steps))], max(steps)
        kept = [own[0]["ts"] for own in self._events.values() if len(own) == _KEPT]
        return max([low * 1e6, *kept]), high * 1e6

    def rows(self, metrics: TraceMetrics, stepping: int) -> tuple[float, list[Row]]:
        """The duration of the chart in seconds, and its rows. Of many ranks, it has those with the longest delays."""
        begin, end = self.window(metrics, stepping)
        rows: list[Row] = []
        for rank in self._chosen(metrics, stepping):
            rows += self._rows(rank, begin, end)
        return (end - begin) * 1e-6, rows

    def _chosen(self, metrics: TraceMetrics, stepping: int) -> list[int]:
        ranks = metrics.ranks
        if len(ranks) <= _RANKS:
            return ranks
        delay: dict[int, float] = defaultdict(float)
        for arrivals in metrics.teams[stepping].arrivals.values():
            delay[arrivals.rank] += arrivals.last - max(arrivals.before, arrivals.first)
        late = sorted(ranks, key=lambda rank: -delay[rank])[: _RANKS // 2]
        return sorted([*late, *[rank for rank in ranks if rank not in late][: _RANKS - len(late)]])

    def _rows(self, rank: int, begin: float, end: float) -> list[Row]:
        lines: dict[Any, list[Event]] = defaultdict(list)
        for event in self._events[rank]:
            if event["ts"] + event["dur"] > begin and event["ts"] < end:
                lines[_line(event)].append(event)
        names = [name for name in ("caller", "calls") if name in lines]
        threads = sorted((key for key in lines if isinstance(key, int)), key=lambda key: -_length(lines[key]))
        out = [Row(rank, name, _spans(lines[name], begin, end)) for name in names]
        return out + [Row(rank, "thread", _raster(lines[key], begin, end)) for key in sorted(threads[:_THREADS])]


def _line(event: Event) -> Any:
    if event["cat"] == "exposed":
        return "caller"
    return "calls" if event["cat"] == "call" or event["name"] == "queue" else event["tid"]


def _length(events: list[Event]) -> float:
    return float(sum(event["dur"] for event in events if event["cat"] == "phase"))


def _spans(events: list[Event], begin: float, end: float) -> tuple[tuple[str, float, float, str], ...]:
    """The spans in the window that are at least one column wide."""
    out = []
    for event in sorted(events, key=lambda event: (event["cat"] != "call", event["ts"])):
        low, high = max(event["ts"], begin), min(event["ts"] + event["dur"], end)
        if high - low >= (end - begin) / _COLUMNS:
            kind = event["name"] if event["cat"] == "phase" else event["cat"]
            text = event["name"] if event["cat"] == "call" else ""
            out.append((kind, (low - begin) * 1e-6, (high - begin) * 1e-6, text))
    return tuple(out)


def _raster(events: list[Event], begin: float, end: float) -> tuple[tuple[str, float, float, str], ...]:
    """The main activity of a thread in each column; a thread may have thousands of spans in a step."""
    width = (end - begin) / _COLUMNS
    spent: dict[int, dict[tuple[str, str], float]] = defaultdict(lambda: defaultdict(float))
    for event in events:
        late = event["cat"] == "wait_for_rank"
        key = ("wait_for_rank", event["name"]) if late else (event["name"], "")
        low, high = max(event["ts"], begin) - begin, min(event["ts"] + event["dur"], end) - begin
        for column in range(int(low / width), min(int(high / width), _COLUMNS - 1) + 1):
            part = min(high, (column + 1) * width) - max(low, column * width)
            spent[column][key] += part
            if late:  # lies inside another span
                spent[column]["network" if event["args"]["target"].startswith("host") else "wait", ""] -= part
    out: list[tuple[str, float, float, str]] = []
    for column in sorted(spent):
        (kind, text), _ = max(spent[column].items(), key=lambda item: item[1])
        if sum(spent[column].values()) < width / 2:  # mostly idle
            continue
        low, high = column * width * 1e-6, (column + 1) * width * 1e-6
        if out and out[-1][0] == kind and out[-1][3] == text and low - out[-1][2] < width * 1e-7:
            out[-1] = (kind, out[-1][1], high, text)
        else:
            out.append((kind, low, high, text))
    return tuple(out)
