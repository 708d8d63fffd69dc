"""Finds the programs and packages of the contenders."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass
from pathlib import Path


class Missing(Exception):
    """A requirement of a contender is missing."""


@dataclass(frozen=True)
class Tools:
    """A folder for compiled programs, and the prefixes of MPICH and Open MPI (None: not given)."""

    folder: Path
    mpich: Path
    openmpi: Path | None = None


def program(path: Path, what: str) -> str:
    """The program at `path`; raises Missing if it does not exist."""
    if not path.exists():
        raise Missing(f"no {what}: {path} does not exist")
    return str(path)


def mpich_program(tools: Tools, name: str) -> str:
    """A program of MPICH, from its prefix (a Python environment) or the PATH."""
    path = tools.mpich / "bin" / name
    found = str(path) if path.exists() else shutil.which(name)
    if not found:
        raise Missing(f"no {name} in {tools.mpich}/bin or in PATH; run 'pip install mpich'")
    return found


def package(name: str) -> Path:
    """The folder of a Python package; raises Missing when it is not installed."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise Missing(f"the Python package {name} is not installed")
    return Path(found.origin).parent
