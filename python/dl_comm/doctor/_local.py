"""The checks that need no other rank, in the order of the report. They come before MPI does: they start processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from dl_comm.doctor import _build, _host, _mpi
from dl_comm.doctor._checks import Check
from dl_comm.doctor._frameworks import Frameworks
from dl_comm.doctor._gpu import Gpu
from dl_comm.doctor._launcher import Launch


def quick_checks(described: dict[str, Any], launch: Launch | None) -> list[Check]:
    """Those that only look at this process: they take no time, and nothing in them can fail."""
    launcher = [_mpi.check_launcher(described, launch)] if launch else []
    return [*_build.check(described), _mpi.check_library(described), *launcher]


def checks(described: dict[str, Any], launch: Launch | None, imports: bool) -> Iterator[list[Check]]:
    """All of them, in parts, each as soon as it is known.

    Args:
        described: What ``dl_comm_describe`` tells.
        launch: Who launched this process; None: nobody did.
        imports: Whether to import the frameworks.
    """
    yield quick_checks(described, launch)
    # Started together, asked in turn.
    programs, mpi4py = _mpi.Programs(described, launch), _mpi.Mpi4py(described) if find_spec("mpi4py") else None
    single_rank = None if launch else _mpi.SingleRank()
    frameworks, gpu = Frameworks(imports), Gpu()
    yield programs.check()
    yield mpi4py.check() if mpi4py else []
    yield single_rank.check() if single_rank else []
    yield frameworks.check()
    yield _host.check(described, _local_ranks(launch))
    yield gpu.check()


def _local_ranks(launch: Launch | None) -> int:
    """The ranks of this host, as the launcher tells; where it does not, two stand for all of a job of several."""
    known = os.environ.get("MPI_LOCALNRANKS") or os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or ""
    return int(known) if known.isdigit() else min(launch.size or 1, 2) if launch else 1
