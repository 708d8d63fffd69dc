"""Loads the CUDA libraries that the core opens by name, from pip's folders."""

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
    """Loads NVRTC and NCCL from this Python's packages, if installed; the core then finds them by name.

    A library in a folder of ``LD_LIBRARY_PATH`` takes precedence.

    Returns:
        The loaded files. Without them the core uses the search path of the system's loader.

    Local; any thread may call it. Only the first call has an effect.
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
    """Whether a driver for this major version of CUDA accepts the library's output; True if unknown."""
    version = re.fullmatch(r"libnvrtc.*\.so\.(\d+)[.\d]*", name)
    return version is None or driver is None or int(version[1]) <= driver


def _driver() -> int | None:
    """The major version of CUDA that the driver supports; None without a driver."""
    try:
        function = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion
    except (OSError, AttributeError):
        return None
    number = ctypes.c_int()
    return number.value // 1000 if function(ctypes.byref(number)) == 0 else None
