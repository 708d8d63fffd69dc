"""Describes the machine and the versions for the report."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.common.tools import Missing, Tools, mpich_program

_DEFAULT_CACHE = 32 << 20
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_SECONDS = 30


def last_level_cache() -> int:
    """The bytes of a processor's largest cache; 32 MiB if unknown."""
    sizes = [_DEFAULT_CACHE] if not _CACHES.exists() else []
    for file in _CACHES.glob("index*/size"):
        text = file.read_text().strip()
        scale = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KM")) * scale)
    return max(sizes, default=_DEFAULT_CACHE)


def busy_seconds() -> float:
    """The processor time of all processes since boot, in seconds."""
    user, nice, system, _idle, _wait, *rest = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + sum(rest[:3])) / os.sysconf("SC_CLK_TCK")


def describe() -> dict[str, Any]:
    """The machine: processor, memory, kernel, load, and the date."""
    memory = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    processor = [line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line]
    names = {key.strip(): value.strip() for key, value in reversed(processor)}
    pages = Path("/sys/kernel/mm/transparent_hugepage")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "processor": names.get("model name") or names.get("CPU part") or platform.machine(),
        "vectors": [flag for flag in ("avx2", "avx512f", "avx512_bf16", "avx512_fp16") if flag in _flags(names)],
        "cores": len(os.sched_getaffinity(0)),
        "last_level_cache": last_level_cache(),
        "memory": int(memory["MemTotal"].split()[0]) << 10,
        "kernel": platform.release(),
        "huge_pages": {file.name: _read(file) for file in (pages / "enabled", pages / "shmem_enabled")},
        "load": os.getloadavg(),
    }


def versions(tools: Tools, packages: Sequence[str]) -> dict[str, str | None]:
    """Versions of these packages and of programs by name; None if missing."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    found["cc"] = _line(["cc", "--version"], "")
    try:
        found["mpich"] = _line([mpich_program(tools, "mpiexec"), "--version"], "Version:")
    except Missing:
        found["mpich"] = None
    found["openmpi"] = _line([str(tools.openmpi / "bin/mpirun"), "--version"], "") if tools.openmpi else None
    found["commit"] = _line(["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"], "")
    found["command"] = " ".join(sys.argv[1:])
    return found


def _flags(names: dict[str, str]) -> list[str]:
    return names.get("flags", names.get("Features", "")).split()


def _read(file: Path) -> str:
    return file.read_text().strip() if file.exists() else ""


def _line(command: list[str], key: str) -> str | None:
    """The first line of a command's output that has `key`, without it; None if the command fails."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
        lines = [line for line in done.stdout.splitlines() if key in line]
        return lines[0].replace(key, "").strip() if lines else None
    return None
