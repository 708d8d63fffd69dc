"""dl_comm for TensorFlow: the collectives as ops, for eager mode, `tf.function` and TF1 graphs.

`gradients` and `broadcast` take lists of tensors; `allreduce`, `all_gather` and the other collectives also single
tensors and groups of ranks, and have gradients. A graph with them may be built before `dl_comm.init()`; running them
before it raises the error of an uninitialized job. `DistributedOptimizer`, `BroadcastHook` and `broadcast_variables`
use these ops. `get_rank`, `get_nranks`, `local_rank` and `DistributedOptimizer` call `dl_comm.init()` if needed, so a
script works right after the import.

Eager calls raise the errors of dl_comm. A graph (a `tf.function`, a session, `model.fit`) raises `tf.errors` with the
same text, from which `dl_comm.error_of` makes the error of dl_comm: InvalidArgumentError (invalid arguments, or calls
that differ between ranks), FailedPreconditionError (not initialized, or calls by name that differ),
DeadlineExceededError, ResourceExhaustedError, and InternalError (for example a lost rank).

Thread rule: any thread may call everything. The ops block no TensorFlow thread while they wait for other ranks. All
ranks issue the same calls of a team; the core matches them by signature. Teams are independent.
"""

from __future__ import annotations

from dl_comm._api.averages import check_buffers_match
from dl_comm._api.init import init
from dl_comm._arrays.groups import Group
from dl_comm._arrays.objects import all_gather_object, broadcast_object, gather_object
from dl_comm._arrays.teams import config_team
from dl_comm._job import ranks
from dl_comm._job.end import finalize
from dl_comm._job.start import ensure_initialized, init_mpi
from dl_comm._levels.split import split
from dl_comm.tensorflow import _derivatives  # noqa: F401 - registers the gradients
from dl_comm.tensorflow._collectives import (
    all_gather,
    all_to_all,
    allreduce,
    barrier,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from dl_comm.tensorflow._messages import recv, send, sendrecv
from dl_comm.tensorflow._ops import average, broadcast, core_id, gradients
from dl_comm.tensorflow._optimizer import DistributedOptimizer
from dl_comm.tensorflow._training import learning_rate
from dl_comm.tensorflow._variables import BroadcastHook, broadcast_variables

__all__ = [
    "BroadcastHook",
    "DistributedOptimizer",
    "Group",
    "all_gather",
    "all_gather_object",
    "all_to_all",
    "allreduce",
    "average",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_variables",
    "check_buffers_match",
    "config_team",
    "core_id",
    "finalize",
    "gather",
    "gather_object",
    "get_localrank",
    "get_nranks",
    "get_rank",
    "gradients",
    "init",
    "init_mpi",
    "learning_rate",
    "local_rank",
    "rank",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "sendrecv",
    "size",
    "split",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def rank() -> int:
    """Return the rank of this process, from 0; calls `dl_comm.init()` if needed."""
    ensure_initialized()
    return ranks.rank()


def size() -> int:
    """Return the number of processes; calls `dl_comm.init()` if needed."""
    ensure_initialized()
    return ranks.size()


def local_rank() -> int:
    """Return the rank of this process among those of its host, from 0; calls `dl_comm.init()` if needed."""
    ensure_initialized()
    return ranks.local_rank()


get_rank = rank
"""The plugin's name of `rank`."""
get_nranks = size
"""The plugin's name of `size`."""
get_localrank = local_rank
"""The plugin's name of `local_rank`."""
