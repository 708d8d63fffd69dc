"""Plots with matplotlib, which is imported at first use."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def pyplot() -> Any:
    """matplotlib.pyplot, drawing to files. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save(figure: Any, path: Path) -> list[Path]:
    """Writes a figure to `path` with the suffixes .png and .svg, closes it, and returns these paths."""
    written = [path.with_suffix(".png"), path.with_suffix(".svg")]
    for target in written:
        figure.savefig(target, dpi=140)
    pyplot().close(figure)
    return written


def about(machine: dict[str, Any], versions: dict[str, Any]) -> str:
    """The machine, date and version for a plot's title."""
    cores = f"{machine['cores']} cores" if machine["cores"] > 1 else "1 core"
    return f"{machine['processor']}, {cores}, {machine['date'][:10]}, dl_comm {versions['dl_comm']}"
