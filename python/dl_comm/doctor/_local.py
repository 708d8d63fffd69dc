"""The checks that need no other rank, in report order. They run before MPI starts, because they start processes."""

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
    """Checks of this process only: instant, and they cannot crash."""
    launcher = [_mpi.check_launcher(described, launch)] if launch else []
    return [*_build.check(described), _mpi.check_library(described), *launcher]


def checks(described: dict[str, Any], launch: Launch | None, imports: bool) -> Iterator[list[Check]]:
    """Yields all checks in parts, each as soon as it is complete.

    Args:
        described: The output of ``dl_comm_describe``.
        launch: The launcher of this process; None: none.
        imports: Whether to import the frameworks.
    """
    yield quick_checks(described, launch)
    # All probes run concurrently.
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
    """The number of ranks on this host from the launcher's variables; at most 2 if unknown."""
    known = os.environ.get("MPI_LOCALNRANKS") or os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    known = known or os.environ.get("LOCAL_WORLD_SIZE") or ""
    return int(known) if known.isdigit() else min(launch.size or 1, 2) if launch else 1
