"""Numbers as text for people: with three digits and a fitting unit (999.9 ms is 1 s).

Thread rule: pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable


def time_text(seconds: float | None) -> str:
    """``1.2 s``, ``34 ms``, ``5.6 µs``; a dash for None."""
    if seconds is None:
        return "–"
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= 0.9995 * factor:
            return f"{_three(seconds / factor)} {unit}"
    return "0" if seconds <= 0 else f"{seconds * 1e6:.2f} µs"


def size_text(size: float) -> str:
    """``0 B``, ``512 B``, ``64 KiB``, ``1.5 GiB``."""
    for factor, unit in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= 0.9995 * factor:
            return f"{_three(size / factor)} {unit}"
    return f"{size:.0f} B"


def wait_text(seconds: float) -> str:
    """A wait, without more than people want to know: ``0.25 s``, ``62 s``, ``12 min``."""
    if seconds >= 600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{max(seconds, 0):.2g} s"


def runs_text(numbers: Iterable[int], separator: str = ", ") -> str:
    """``0, 2-4`` for 0, 2, 3, 4."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return separator.join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def rate_text(rate: float) -> str:
    """Bytes a second: ``2.5 GB/s``, ``0``."""
    for factor, unit in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if rate >= 0.9995 * factor:
            return f"{_three(rate / factor)} {unit}"
    return f"{rate:.0f} B/s" if rate else "0"


def _three(value: float) -> str:
    return f"{value:.0f}" if value >= 99.5 else f"{value:.3g}"
