"""Finds what contenders need."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass
from pathlib import Path


class Missing(Exception):
    """What a contender needs is not there."""


@dataclass(frozen=True)
class Tools:
    """Where things are: a folder for programs, the MPICH's and the Open MPI's prefixes (None: it is not given)."""

    folder: Path
    mpich: Path
    openmpi: Path | None = None


def program(path: Path, what: str) -> str:
    """An existing program; raises Missing when there is none at `path`."""
    if not path.exists():
        raise Missing(f"no {what}: {path} does not exist")
    return str(path)


def mpich_program(tools: Tools, name: str) -> str:
    """A program of the MPICH: of its prefix, which a Python environment is, or else of the path."""
    beside = tools.mpich / "bin" / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        raise Missing(f"no {name} in {tools.mpich}/bin or in PATH; 'pip install mpich' brings one")
    return found


def package(name: str) -> Path:
    """The folder of a Python package; raises Missing when it is not installed."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise Missing(f"the Python package {name} is not installed")
    return Path(found.origin).parent
