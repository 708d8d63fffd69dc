"""Tables for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def grid(rows: Sequence[Sequence[str]]) -> str:
    """Formats rows of cells with right-aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def number(value: float | None) -> str:
    """A number with about four digits; "-" for none."""
    if value is None:
        return "-"
    size = abs(value)
    return f"{value:.2f}" if size < 100 else f"{value:.1f}" if size < 10_000 else f"{value:.0f}"


def ratio(above: float | None, below: float | None) -> str:
    """A ratio; "-" without one."""
    return f"{above / below:.2f}" if above is not None and below else "-"
