"""dl_comm: data-parallel training for PyTorch, TensorFlow, Keras and NumPy over MPI and shared memory.

Four calls make a script that trains on one process train on many::

    import dl_comm as mc

    mc.init(nthread_per_team=2, nteams=1)
    mc.broadcast(parameters, 0)               # all ranks start from the parameters of rank 0
    gradients = mc.gradients(gradients, 0)    # in each step: the mean over all ranks
    mc.finalize()

started with ``mpiexec -n 4 python script.py``; without a launcher a script is rank 0 of 1. The names and arguments are
those of the Cray PE DL Plugin. The lists may hold NumPy arrays, TensorFlow or PyTorch tensors; ``dl_comm.torch``,
``dl_comm.tensorflow`` and ``dl_comm.keras`` offer optimizers and callbacks. Importing this package imports no
framework.

Thread rule: every function may be called from any thread; those marked *collective* must be called by all ranks, in one
order for each team. None holds the GIL while it waits.
"""

from __future__ import annotations

from dl_comm import _process, timeline, training
from dl_comm._checkpoint import rank0_path, rank_path, read_on_rank0, write_on_rank0
from dl_comm._collectives import average, broadcast, check_buffers_match, gradients
from dl_comm._diagnosis import dump, stats
from dl_comm._dl_comm import __version__, core_id
from dl_comm._errors import (
    ArgumentError,
    CommError,
    DTypeError,
    MismatchError,
    PeerLostError,
    StateError,
    TimeoutError,  # noqa: A004 - a subclass of the builtin
)
from dl_comm._metrics import average_metrics
from dl_comm._paths import get_cmake_dir, get_include
from dl_comm._process import (
    barrier,
    config_team,
    create_team,
    finalize,
    get_localrank,
    get_nranks,
    get_rank,
    get_waited,
    hosts,
    init,
    init_mpi,
    is_initialized,
    local_rank,
    local_size,
    rank,
    set_timeout,
    size,
)

__all__ = [
    "ArgumentError",
    "CommError",
    "DTypeError",
    "MismatchError",
    "PeerLostError",
    "StateError",
    "TimeoutError",
    "__version__",
    "average",
    "average_metrics",
    "barrier",
    "broadcast",
    "check_buffers_match",
    "config_team",
    "core_id",
    "create_team",
    "dump",
    "finalize",
    "get_cmake_dir",
    "get_include",
    "get_localrank",
    "get_nranks",
    "get_rank",
    "get_waited",
    "gradients",
    "hosts",
    "init",
    "init_mpi",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "rank0_path",
    "rank_path",
    "read_on_rank0",
    "set_timeout",
    "size",
    "stats",
    "timeline",
    "training",
    "write_on_rank0",
]

_process.finalize_at_exit()
