"""The numbers of this process and its job.

Thread rule: any thread.
"""

from __future__ import annotations

from collections.abc import Callable

from dl_comm import _dl_comm
from dl_comm._base.errors import StateError
from dl_comm._job.start import init_mpi


def is_initialized() -> bool:
    """Whether ``init`` has succeeded and ``finalize`` was not called yet."""
    return _dl_comm.is_initialized()


def _when_started(number: Callable[[], int]) -> int:
    """A number that a rank knows. Makes this process a rank first if needed."""
    try:
        return number()
    except StateError:
        init_mpi()
    return number()


def rank() -> int:
    """The rank of this process, from 0; starts the ranks if ``init`` was not called."""
    return _when_started(_dl_comm.rank)


def size() -> int:
    """The number of processes; starts the ranks if ``init`` was not called."""
    return _when_started(_dl_comm.size)


def local_rank() -> int:
    """The rank of this process among those of its host, from 0; starts the ranks if ``init`` was not called."""
    return _when_started(_dl_comm.local_rank)


def get_rank() -> int:
    """As ``dl_comm.rank``, which is the rank of this process, from 0; calls ``init_mpi`` if needed."""
    return rank()


def get_nranks() -> int:
    """As ``dl_comm.size``, which is the number of processes; calls ``init_mpi`` if needed."""
    return size()


def get_localrank() -> int:
    """As ``dl_comm.local_rank``, which is the rank among the processes of this host; calls ``init_mpi`` if needed."""
    return local_rank()


def local_size() -> int:
    """The number of processes on this host; starts the ranks if ``init`` was not called."""
    return _when_started(_dl_comm.local_size)


def num_hosts() -> int:
    """The number of hosts: sets of processes that share memory; starts the ranks if ``init`` was not called."""
    return _when_started(_dl_comm.hosts)
