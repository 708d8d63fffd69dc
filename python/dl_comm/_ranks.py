"""The numbers of this process and its job.

Thread rule: any thread.
"""

from __future__ import annotations

from collections.abc import Callable

from dl_comm import _dl_comm
from dl_comm._errors import StateError
from dl_comm._start import init_mpi


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


def get_rank() -> int:
    """The rank of this process, from 0; calls ``init_mpi`` if needed. The plugin's name of ``rank``."""
    return _when_started(_dl_comm.rank)


def get_nranks() -> int:
    """The number of processes; calls ``init_mpi`` if needed. The plugin's name of ``size``."""
    return _when_started(_dl_comm.size)


def get_localrank() -> int:
    """The rank of this process among those of its host, from 0; calls ``init_mpi`` if needed. Also ``local_rank``."""
    return _when_started(_dl_comm.local_rank)


def local_size() -> int:
    """The number of processes on this host; calls ``init_mpi`` if needed."""
    return _when_started(_dl_comm.local_size)


def num_hosts() -> int:
    """The number of hosts: sets of processes that share memory; calls ``init_mpi`` if needed."""
    return _when_started(_dl_comm.hosts)


rank = get_rank
size = get_nranks
local_rank = get_localrank
