"""The libraries of CUDA that the core loads by name, where pip has put them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import sysconfig
from pathlib import Path

_WANTED = ("libnvrtc-builtins.so.*", "libnvrtc.so.*", "libnccl.so.2")


@functools.cache
def preload() -> tuple[str, ...]:
    """Loads NVRTC and NCCL from this Python's packages, if they are there; the core then finds them by their names.

    What is in a folder of ``LD_LIBRARY_PATH`` goes first.

    Returns:
        The files. Without them the core looks where the system's loader does.

    Local; may be called from any thread, and does something once.
    """
    chosen = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    roots = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    driver = _driver()
    loaded = []
    for pattern in _WANTED:
        if any(list(Path(folder).glob(pattern)) for folder in chosen):
            continue
        files = [file for root in roots for file in Path(root, "nvidia").glob(f"*/lib/{pattern}")]
        files = [file for file in files if ".alt." not in file.name and fits(file.name, driver)]
        for file in sorted(files, key=lambda file: file.name)[-1:]:
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(file))
                loaded.append(str(file))
    return tuple(loaded)


def fits(name: str, driver: int | None) -> bool:
    """Whether a driver for this major version of CUDA takes what the library makes; True where it is not known."""
    version = re.fullmatch(r"libnvrtc.*\.so\.(\d+)[.\d]*", name)
    return version is None or driver is None or int(version[1]) <= driver


def _driver() -> int | None:
    """The major version of CUDA that the driver is for; None where there is no driver."""
    try:
        function = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion
    except (OSError, AttributeError):
        return None
    number = ctypes.c_int()
    return number.value // 1000 if function(ctypes.byref(number)) == 0 else None
