"""The content of the report as one JSON object of bounded size: the metrics of each team, and of all teams.

Times are seconds. The HTML report includes it for programs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from dl_comm._base.text import time_text
from dl_comm.timeline._metrics import OTHERS, TeamMetrics, TraceMetrics

_MOST_BINS = 100
_MOST_CELLS = 32


def report(metrics: TraceMetrics, limit: tuple[float, str] | None) -> dict[str, Any]:
    """The content of the report.

    Args:
        metrics: Metrics of all ranks.
        limit: Bandwidth limit of a rank in bytes a second, and its source; None: use the best call.
    """
    teams = {number: metrics.teams[number] for number in sorted(metrics.teams)}
    chosen = {number: team for number, team in teams.items() if number != OTHERS} or teams
    stepping = max(chosen, key=lambda number: sum(map(len, chosen[number].steps.values())), default=OTHERS)
    total = _sum_teams(chosen, stepping)
    begin = min((low for low, _ in metrics.ranges.values()), default=0.0)
    end = max((high for _, high in metrics.ranges.values()), default=0.0)
    best = max((size.best for size in total.sizes.values()), default=0.0)
    rate, source = limit or (best, "the best call of this timeline")
    return {
        "ranks": {rank: metrics.titles.get(rank, f"rank {rank}") for rank in metrics.ranks},
        "seconds": end - begin,
        "stepping": stepping,
        "reference": {"rate": rate, "source": source, "measured": limit is not None},
        "all": _view(total, metrics.ranks),
        "teams": {number: _view(team, metrics.ranks_of(number)) for number, team in teams.items()},
        "names": {number: label.name for number, label in metrics.groups.items() if number in teams},
    }


def _sum_teams(teams: dict[int, TeamMetrics], stepping: int) -> TeamMetrics:
    """The sum of the teams; the steps are those of team ``stepping``, because steps of several teams overlap."""
    out = TeamMetrics()
    for number, team in teams.items():
        out.calls += team.calls
        out.failed += team.failed
        out.bytes += team.bytes
        for rank, seconds in team.comm.items():
            out.comm[rank] += seconds
        for rank, waits in team.exposed.items():
            out.exposed[rank] += waits
        for cell, seconds in team.waits.items():
            out.waits[cell] += seconds
        for exponent, size in team.sizes.items():
            sums = out.sizes[exponent]
            sums.calls, sums.bytes = sums.calls + size.calls, sums.bytes + size.bytes
            sums.seconds, sums.best = sums.seconds + size.seconds, max(sums.best, size.best)
        for arrivals in team.arrivals.values():
            out.arrivals[len(out.arrivals)] = arrivals
        if number == stepping:
            out.steps = team.steps
    return out


def _view(team: TeamMetrics, ranks: list[int]) -> dict[str, Any]:
    exposed = sum(seconds for waits in team.exposed.values() for _, seconds in waits)
    return {
        "calls": team.calls,
        "failed": team.failed,
        "bytes": team.bytes,
        "comm_s": sum(team.comm.values()),
        "exposed_s": exposed,
        "overlap": team.overlap,
        "steps": _steps(team, ranks),
        "late": _late(team, ranks),
        "last": _last(team, ranks),
        "sizes": [
            {"exponent": exponent, "calls": size.calls, "bytes": size.bytes, "rate": size.rate, "best": size.best}
            for exponent, size in sorted(team.sizes.items())
        ],
    }


def _steps(team: TeamMetrics, ranks: list[int]) -> dict[str, Any]:
    times = [team.step_times(rank) for rank in ranks]
    exposed = [team.step_exposed(rank) for rank in ranks]
    flat = [t for own in times for t in own]
    count = max(map(len, times), default=0)
    width = max(1, math.ceil(count / _MOST_BINS))
    series = []
    for begin in range(0, count, width):
        part = [t for own in times for t in own[begin : begin + width]]
        waited = [median for own in exposed if (median := quantile(own[begin : begin + width], 0.5)) is not None]
        series.append({"time_s": quantile(part, 0.5), "most_s": max(part), "exposed_s": max(waited)})
    # Of each rank: a straggler waits for nobody, and its zeros would hide what it costs the others.
    medians = {rank: quantile(own, 0.5) or 0.0 for rank, own in zip(ranks, exposed, strict=True) if own}
    by_rank = [{"rank": rank, "median_s": medians[rank]} for rank in sorted(medians, key=lambda rank: -medians[rank])]
    return {
        "count": count,
        "width": width,
        "median_s": quantile(flat, 0.5),
        "p95_s": quantile(flat, 0.95),
        "exposed_most": by_rank[0] if by_rank else None,
        "exposed_least": by_rank[-1] if by_rank else None,
        "series": series,
    }


def exposed_text(steps: dict[str, Any]) -> str:
    """The exposed time of a step on the rank that waits most, and on the one that waits least."""
    most, least = steps["exposed_most"], steps["exposed_least"]
    if most is None:
        return time_text(None)
    text = f"{time_text(most['median_s'])} on rank {most['rank']}"
    return text if most["rank"] == least["rank"] else f"{text}, {time_text(least['median_s'])} on rank {least['rank']}"


def quantile(values: list[float], share: float) -> float | None:
    """The quantile ``share`` with linear interpolation; None without values."""
    if not values:
        return None
    ordered, place = sorted(values), share * (len(values) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _late(team: TeamMetrics, ranks: list[int]) -> dict[str, Any]:
    """Waits by rank; with many ranks, a row or column stands for several."""
    hosts = sorted({target for _, target in team.waits if not target.startswith("rank ")})
    group = max(1, math.ceil((max(ranks, default=0) + 1) / _MOST_CELLS))
    rows = sorted({rank // group for rank in ranks})
    columns = [*(str(row) for row in rows), *hosts]
    sums: dict[tuple[int, str], float] = defaultdict(float)
    for (rank, target), seconds in team.waits.items():
        late = str(int(target.removeprefix("rank ")) // group) if target.startswith("rank ") else target
        sums[rank // group, late] += seconds
    text = {str(row): _span(row * group, group) for row in rows}
    return {
        "rows": [_span(row * group, group) for row in rows],
        "columns": [text.get(column, column) for column in columns],
        "seconds": [[sums[row, column] for column in columns] for row in rows],
    }


def _span(first: int, group: int) -> str:
    return str(first) if group == 1 else f"{first}-{first + group - 1}"


def _last(team: TeamMetrics, ranks: list[int]) -> list[dict[str, Any]]:
    """For each rank, how often it started a call last, and its total delay after the rank before; longest first."""
    times: dict[int, int] = defaultdict(int)
    seconds: dict[int, float] = defaultdict(float)
    for arrivals in team.arrivals.values():
        if arrivals.ranks == len(ranks) > 1:
            times[arrivals.rank] += 1
            seconds[arrivals.rank] += arrivals.last - arrivals.before
    order = sorted(times, key=lambda rank: -seconds[rank])[:_MOST_CELLS]
    return [{"rank": rank, "times": times[rank], "seconds": seconds[rank]} for rank in order]
