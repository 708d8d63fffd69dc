"""Checks the installed core, Python, the C++ compiler for later builds, and the settings."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from typing import Any

import numpy as np

from dl_comm._base.paths import CORE
from dl_comm.doctor._checks import Check
from dl_comm.doctor._tested import is_tested, tested_text


def check(described: dict[str, Any]) -> list[Check]:
    """The checks; ``described`` is the output of ``dl_comm_describe``."""
    return [_core(described), _python(), _compiler(), _settings(described)]


def _core(described: dict[str, Any]) -> Check:
    loaded = described["library"]
    facts = {"version": described["version"], "library": loaded, "numpy": np.__version__}
    if loaded is None or not CORE.exists() or not os.path.samefile(loaded, CORE):
        text = (
            f"the loaded core is {loaded}, not {CORE}: another dl_comm was loaded (LD_LIBRARY_PATH, LD_PRELOAD), or "
            "the file was replaced while this program ran"
        )
        return Check("build", "core", "bad", text, facts)
    return Check("build", "core", "ok", f"dl_comm {described['version']}, {CORE}", facts)


def _python() -> Check:
    version = platform.python_version()
    facts = {"version": version, "executable": sys.executable, "tested": tested_text("python")}
    text = f"Python {version} ({sys.executable}), numpy {np.__version__}"
    if is_tested("python", version):
        return Check("build", "python", "ok", text, facts)
    return Check("build", "python", "warn", f"{text}; tested: {tested_text('python')}", facts)


def _compiler() -> Check:
    chosen = os.environ.get("CXX", "").split()
    found = next(filter(None, map(shutil.which, [*chosen[:1], "c++", "g++", "clang++"])), None)
    if found:
        text = f"{found}: operations for another framework version can be built"
        return Check("build", "compiler", "ok", text, {"path": found})
    text = "no C++ compiler: operations for frameworks cannot be built here; install g++, or set CXX to a compiler"
    return Check("build", "compiler", "warn", text, {"path": None})


def _settings(described: dict[str, Any]) -> Check:
    if error := described.get("settings_error"):
        return Check("build", "settings", "bad", str(error), {"error": error})
    settings: dict[str, Any] = described["settings"]
    if unknown := described["unknown_variables"]:
        names = [f"{name} (did you mean {nearest}?)" if nearest else name for name, nearest in unknown.items()]
        text = f"unknown variables have no effect: {', '.join(names)}"
        return Check("build", "settings", "warn", text, {**settings, "unknown": unknown})
    chosen = [f"{name}={settings[name]}" for name in settings if os.environ.get(name)]
    text = ", ".join(chosen) or "all DL_COMM_* variables have their defaults"
    return Check("build", "settings", "ok", text, settings)
