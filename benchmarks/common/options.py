"""Command line options shared by the benchmarks."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def parser(package: Any, out: str, deadline_s: float) -> argparse.ArgumentParser:
    """A parser with the common options; `package`'s docstring describes the method."""
    made = argparse.ArgumentParser(
        prog=f"python -m {package.__name__}",
        description=package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--deadline-s", type=float, default=deadline_s, help=f"limit of a trial ({deadline_s:g})")
    made.add_argument("--mpich", type=Path, default=Path(sys.prefix), help="prefix of MPICH (this environment)")
    made.add_argument("--quick", action="store_true", help="a run of seconds for tests, without meaningful numbers")
    made.add_argument("--out", type=Path, default=Path(out), help=f"folder of the results ({out})")
    return made


def complete(options: argparse.Namespace, values: Mapping[str, Any]) -> None:
    """Sets the defaults of options that were not given (None)."""
    for name, value in values.items():
        if getattr(options, name) is None:
            setattr(options, name, value)


def begin(out: Path) -> None:
    """Creates the folder of the results, and makes SIGTERM stop the contenders too."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    out.mkdir(parents=True, exist_ok=True)
