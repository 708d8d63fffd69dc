"""Compiles the C programs, and finds what the contenders need."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent / "c"
FLAGS = ["-std=gnu11", "-O3", "-march=native", "-Wall", "-Wextra", "-Wno-psabi"]
_SECONDS = 120


class Missing(Exception):
    """What a contender needs is not there."""


@dataclass(frozen=True)
class Tools:
    """Where things are: a folder for programs, the MPICH's and the Open MPI's prefixes (None: it is not given)."""

    folder: Path
    mpich: Path
    openmpi: Path | None


def compile_program(tools: Tools, compiler: Sequence[str], source: str, name: str, extra: Sequence[str] = ()) -> str:
    """Compiles `source` with the turns of the C programs, once; returns the program's path."""
    return _compile(tools.folder / name, tuple(compiler), (source, "turns.c", "spin.c"), tuple(extra))


def spin_library(tools: Tools) -> str:
    """The barrier for Python."""
    return _compile(tools.folder / "libspin.so", ("cc",), ("spin.c",), ("-shared", "-fPIC"))


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


@cache
def _compile(target: Path, compiler: tuple[str, ...], sources: tuple[str, ...], extra: tuple[str, ...]) -> str:
    if not shutil.which(compiler[0]):
        raise Missing(f"no compiler {compiler[0]}")
    files = [str(SOURCES / source) for source in sources]
    command = [*compiler, *FLAGS, *files, "-o", str(target), *extra]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    if done.returncode != 0:
        raise Missing(f"{' '.join(command)} failed: {done.stderr.strip()[-600:]}")
    if done.stderr:
        print(done.stderr, file=sys.stderr)
    return str(target)
