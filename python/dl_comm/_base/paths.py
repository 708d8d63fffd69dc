"""The files of the installed package."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
CORE = PACKAGE / "libdl_comm.so.0"
SOURCES = PACKAGE / "_src"


def get_include() -> str:
    """The folder of ``dl_comm.h``, for C and C++ programs."""
    return str(PACKAGE / "include")


def get_cmake_dir() -> str:
    """The folder for ``cmake -Ddl_comm_DIR=...``, so that ``find_package(dl_comm)`` gives ``dl_comm::dl_comm``."""
    return str(PACKAGE / "cmake")
