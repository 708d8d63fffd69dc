"""The version of Horovod whose API this is, with that of dl_comm as its local part."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def _version() -> str:
    try:
        return f"0.28.1+dl_comm.{version('dl_comm')}"
    except PackageNotFoundError:  # dl_comm is not installed, but on the path
        return "0.28.1+dl_comm"


__version__ = _version()
