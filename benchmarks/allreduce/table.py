"""Formats the results as tables for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from benchmarks.common.grid import grid, number, ratio

_TITLES = {"buffer": "one buffer", "latency": "latency", "list": "lists of tensors"}


def tables(cases: Sequence[dict[str, Any]]) -> str:
    """All tables: times and ratios for each number of ranks, kind and type; percentiles for latencies."""
    parts = []
    for (ranks, kind, dtype), group in groupby(cases, lambda case: (case["ranks"], case["kind"], case["dtype"])):
        rows = list(group)
        title = f"{_TITLES[kind]}, {dtype}, {ranks} ranks"
        if kind == "latency":
            parts.append(f"{title}: microseconds\n" + grid(list(_percentiles(rows))))
            continue
        parts.append(f"{title}: median, microseconds\n" + grid(list(_times(rows))))
        parts.append(f"{title}: ours over the limit, and the fastest peer over ours\n" + grid(list(_ratios(rows))))
    return "\n\n".join(parts)


def size_text(size: int) -> str:
    """Formats bytes: "64 B", "4 KiB", "1.5 MiB"."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:g} {unit}" if value == int(value) else f"{value:.1f} {unit}"


def median(case: dict[str, Any], name: str) -> float | None:
    """A contender's median in a case, in microseconds; None without one."""
    found: float | None = case["results"].get(name, {}).get("median_us")
    return found


def fastest_peer(case: dict[str, Any]) -> str | None:
    """The peer with the smallest median, over all list modes; None without peers."""
    peers = {
        name: result["median_us"]
        for name, result in case["results"].items()
        if result["group"] == "peer" and "median_us" in result
    }
    return min(peers, key=lambda name: peers[name]) if peers else None


def names(cases: Sequence[dict[str, Any]], group: str = "") -> list[str]:
    """The contenders of a group ("": all) with a time in any case, in order."""
    found = {
        name: None
        for case in cases
        for name, result in case["results"].items()
        if group in ("", result["group"]) and "median_us" in result
    }
    return list(found)


def _times(rows: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    columns = names(rows)
    yield ["", *columns]
    for case in rows:
        yield [_label(case), *(number(median(case, name)) for name in columns)]


def _ratios(rows: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    ours = names(rows, "ours")
    yield ["", "line, ns", "fastest peer", *(text for name in ours for text in (f"{name}/limit", f"peer/{name}"))]
    for case in rows:
        peer = fastest_peer(case)
        cells = [_label(case), number(case.get("cache_line_ns")), peer or "-"]
        for name in ours:
            mine = median(case, name)
            cells += [ratio(mine, median(case, "limit")), ratio(median(case, peer) if peer else None, mine)]
        yield cells


def _percentiles(rows: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    keys = list(dict.fromkeys(key for case in rows for _, found in _found(case) for key in found))
    yield ["", "", *keys, "of"]
    for case in rows:
        for name, found in _found(case):
            count = str(case["results"][name]["iterations"])
            yield [_label(case), name, *(number(found.get(key)) for key in keys), count]


def _found(case: dict[str, Any]) -> Iterator[tuple[str, dict[str, float]]]:
    for name, result in case["results"].items():
        if "percentiles_us" in result:
            yield name, result["percentiles_us"]


def _label(case: dict[str, Any]) -> str:
    size = size_text(case["bytes"])
    return f"{case['name']} ({case['tensors']}, {size})" if case["kind"] == "list" else size
