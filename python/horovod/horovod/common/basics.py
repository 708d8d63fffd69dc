"""Start, end, ranks, build queries and timeline: what every binding of Horovod has.

Thread rule: ``init`` and ``shutdown`` are collective; any thread may call the others.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from typing import Any

from horovod.common import _job, _timeline, process_sets
from horovod.common.exceptions import translated


class HorovodBasics:
    """The functions that all bindings share. Objects of it are alike: the job is that of the process.

    Args:
        pkg_path: Not used.
        args: Not used.
    """

    Average, Sum, Adasum, Min, Max, Product = range(6)

    def __init__(self, pkg_path: str = "", *args: str) -> None:
        pass

    def init(
        self, comm: Sequence[int] | Any = None, process_sets: Sequence[process_sets.ProcessSet] | str | None = None
    ) -> None:
        """Starts Horovod. Collective. A second call only registers process sets.

        The ranks come from ``HOROVOD_RANK``, ``HOROVOD_SIZE`` and ``HOROVOD_GLOO_RENDEZVOUS_ADDR`` and ``_PORT``, on
        which rank 0 listens, or else from whatever started them, as for ``dl_comm.init``.

        Args:
            comm: Ranks of the launcher, or an mpi4py communicator, which become the ranks of Horovod; None: all. Only
                they call it.
            process_sets: The process sets to register, the same on all ranks, or ``"dynamic"`` for
                ``add_process_set``.

        Raises:
            ValueError: An argument is invalid, a process set is a duplicate, or the ranks cannot start.
            HorovodInternalError: The ranks differ, or one missed the deadline.
        """
        sets: list[Any] = []
        if isinstance(process_sets, str):
            if process_sets.lower() != "dynamic":
                raise ValueError(f"process_sets is {process_sets!r} (expected a list of process sets, or 'dynamic')")
            os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
        else:
            sets = list(process_sets or ())
        ranks = None
        if comm is not None and not isinstance(comm, Iterable):
            ranks = _sets.ranks_of(comm)
            _sets.global_process_set.mpi_comm = comm
        elif comm is not None:
            ranks = list(comm) or None
        _job.start(ranks)
        _sets.register(sets)

    def shutdown(self) -> None:
        """Ends Horovod. Collective; without ``init`` it does nothing. Calls that nobody waits for do not hinder it."""
        _job.stop()

    def is_initialized(self) -> bool:
        """Whether ``init`` was called, and ``shutdown`` was not since."""
        return _job.is_started()

    def start_timeline(self, file_path: str, mark_cycles: bool = False) -> None:
        """Starts a timeline in a file, which rank 0 writes. It replaces one that records.

        Args:
            file_path: The path.
            mark_cycles: Whether to mark each submission as the start of a cycle.

        Raises:
            ValueError: Before ``init``.
        """
        _timeline.start(os.fspath(file_path), bool(mark_cycles), _job.current().rank)

    def stop_timeline(self) -> None:
        """Completes the timeline's file. Raises ValueError before ``init``."""
        _job.current()
        _timeline.stop()

    def size(self) -> int:
        """The number of ranks. Raises ValueError before ``init``, as those below."""
        return _job.current().size

    def rank(self) -> int:
        """The rank of this process."""
        return _job.current().rank

    def local_size(self) -> int:
        """The number of ranks on this host."""
        return _job.current().local_size

    def local_rank(self) -> int:
        """The number of this rank among those of its host."""
        return _job.current().local_rank

    def cross_size(self) -> int:
        """The number of hosts that have a rank of this local rank."""
        return _job.current().cross_size

    def cross_rank(self) -> int:
        """The number of this host among them."""
        return _job.current().cross_rank

    def is_homogeneous(self) -> bool:
        """Whether all hosts have as many ranks."""
        return _job.current().is_homogeneous

    def mpi_built(self) -> bool:
        """Whether MPI can start the ranks: True."""
        return True

    def mpi_enabled(self) -> bool:
        """Whether MPI started the ranks of this job."""
        return _job.is_started() and _job.current().launcher == "mpiexec"

    def mpi_threads_supported(self) -> bool:
        """Whether several threads may call MPI, as mpi4py tells. Raises ValueError if MPI did not start the ranks."""
        if not self.mpi_enabled():
            raise ValueError("MPI did not start the ranks")
        try:
            from mpi4py import MPI
        except ImportError:
            return False  # nobody else calls MPI
        return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)

    def gloo_built(self) -> bool:
        """Whether the ranks can start without MPI, as Horovod does with Gloo: True."""
        return True

    def gloo_enabled(self) -> bool:
        """Whether the ranks of this job started without MPI."""
        return _job.is_started() and not self.mpi_enabled()

    def nccl_built(self) -> int:
        """The version of the NCCL that this process can load, such as 22703; 0: none."""
        version = ctypes.c_int()
        try:
            ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
        except (OSError, AttributeError):
            return 0
        return version.value

    def cuda_built(self) -> bool:
        """Whether this process can load a CUDA driver."""
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            return False
        return True

    def ddl_built(self) -> bool:
        """Whether IBM DDL moves data: False."""
        return False

    def ccl_built(self) -> bool:
        """Whether oneCCL moves data: False."""
        return False

    def rocm_built(self) -> bool:
        """Whether ROCm moves data: False."""
        return False

    def _process_set_size(self, process_set_id: int) -> int:
        return _sets.size_of(process_set_id)

    def _process_set_rank(self, process_set_id: int) -> int:
        return _sets.rank_in(process_set_id)

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        return {number: list(ranks) for number, ranks in _job.current().sets.items()}


_sets = process_sets
"""Under another name than the argument of ``init``."""


def barrier(process_set: process_sets.ProcessSet = process_sets.global_process_set) -> None:
    """Waits until all ranks of a process set have called it. Collective.

    Raises:
        HorovodInternalError: A rank was lost, or missed the deadline.
        ValueError: Before ``init``, or this rank is not in the set.
    """
    import dl_comm

    with translated():
        dl_comm.barrier(group=_job.group_of(process_set.process_set_id))


def join() -> int:
    """Contributes zeros to the sums and means of other ranks until all ranks have joined. Collective.

    Returns:
        The rank that joined last.

    Raises:
        HorovodInternalError: A rank was lost, or ended without joining.
    """
    import dl_comm

    with translated():
        return int(dl_comm.join(group=_job.current().world))
