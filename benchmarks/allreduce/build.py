"""Compiles the C programs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from benchmarks.common.tools import Missing, Tools

SOURCES = Path(__file__).parent / "c"
FLAGS = ["-std=gnu11", "-O3", "-march=native", "-Wall", "-Wextra", "-Wno-psabi"]
_SECONDS = 120


def compile_program(tools: Tools, compiler: Sequence[str], source: str, name: str, extra: Sequence[str] = ()) -> str:
    """Compiles `source` with trial.c and spin.c, once; returns the program's path."""
    return _compile(tools.folder / name, tuple(compiler), (source, "trial.c", "spin.c"), tuple(extra))


def spin_library(tools: Tools) -> str:
    """Compiles the barrier for Python; returns its path."""
    return _compile(tools.folder / "libspin.so", ("cc",), ("spin.c",), ("-shared", "-fPIC"))


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


def cache_line_ns(tools: Tools) -> float | None:
    """The time that a cache line takes from one processor to another; None without a second one.

    Processors that share a cache ("near") take some 30 ns, others ("far") more than 100. A virtual machine may change
    that while it runs.
    """
    program = _compile(tools.folder / "ping", ("cc",), ("ping.c",), ("-pthread",))
    try:
        done = subprocess.run([program], capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return None
    return float(done.stdout) if done.returncode == 0 else None
