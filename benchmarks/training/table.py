"""Formats the results as tables for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from benchmarks.common.grid import grid, number, ratio


def tables(cases: Sequence[dict[str, Any]]) -> str:
    """For each number of ranks: the times of all contenders, and the ratios."""
    parts = []
    for ranks, group in groupby(cases, lambda case: case["ranks"]):
        rows = list(group)
        title = f"{ranks} ranks" if ranks > 1 else "1 rank"
        parts.append(f"{title}: medians (quartiles), milliseconds\n" + grid(list(_times(rows))))
        parts.append(f"{title}: ratios of step and exposed times\n" + grid(list(_ratios(rows))))
        parts += [f"WRONG: {case['model']}: {text}" for case in rows for text in case["verified"]["problems"]]
    return "\n\n".join(parts)


def count_text(count: int) -> str:
    """Formats a number of parameters."""
    return f"{count / 1e6:.1f} M" if count >= 1_000_000 else f"{count / 1e3:.0f} k"


def value(case: dict[str, Any], name: str, key: str) -> float | None:
    """A contender's number in a case; None without one."""
    found: float | None = case["results"].get(name, {}).get(key)
    return found


def _times(rows: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    yield ["", "", "steps/s", "step", "", "exposed", "", "reported: exposed", "busy"]
    for case in rows:
        label = f"{case['model']} ({count_text(case['parameters'])})"
        for name, result in case["results"].items():
            reported = [number(result.get(f"reported_{key}_ms")) for key in ("exposed", "busy")]
            cells = [number(result.get("steps_per_s")), number(result.get("step_ms")), _range(result, "quartiles_ms")]
            cells += [number(result.get("exposed_ms")), _range(result, "exposed_quartiles_ms"), *reported]
            yield [label, name, *cells]
            label = ""


def _ratios(rows: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    yield ["", "ours/independent", "ddp/independent", "ours/ddp", "ours/one", "exposed: ddp/ours"]
    for case in rows:
        steps = {name: value(case, name, "step_ms") for name in case["results"]}
        ours, ddp, independent = steps.get("ours"), steps.get("ddp"), steps.get("independent")
        mine, theirs = value(case, "ours", "exposed_ms"), value(case, "ddp", "exposed_ms")
        cells = [ratio(ours, independent), ratio(ddp, independent), ratio(ours, ddp), ratio(ours, steps.get("one"))]
        # No ratio if the exposed time is only noise.
        yield [case["model"], *cells, ratio(theirs, mine) if mine is not None and mine > 0 else "-"]


def _range(result: dict[str, Any], key: str) -> str:
    return f"({' to '.join(number(end) for end in result[key])})" if key in result else ""
