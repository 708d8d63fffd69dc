"""dl_comm for TensorFlow: averages and broadcasts as ops, eagerly, in a `tf.function` and in a TF1 graph.

`gradients` and `broadcast` are ops on lists of tensors; a graph that has them may be built before `dl_comm.init()`, and
they fail with `tf.errors.FailedPreconditionError` when they run before it. `DistributedOptimizer`, `BroadcastHook` and
`broadcast_variables` are made of them. `get_rank`, `get_nranks`, `local_rank` and `DistributedOptimizer` call
`dl_comm.init()` themselves when nobody has, so that a script works straight after the import.

Errors of the ops are `tf.errors`: InvalidArgumentError (wrong arguments, or calls that differ between the ranks),
FailedPreconditionError (not initialised), DeadlineExceededError, ResourceExhaustedError, and InternalError (a rank is
gone, for one); each text has `dl_comm error <code>:`, the codes being those of dl_comm.h.

Thread rule: everything may be called from any thread. The ops hold no thread of TensorFlow while they wait for other
ranks. All ranks run the same calls of a team, which are lined up by what they are; teams are independent.
"""

from __future__ import annotations

import dl_comm
from dl_comm._process import ensure_initialized
from dl_comm.tensorflow._ops import average, broadcast, core_id, gradients
from dl_comm.tensorflow._optimizer import DistributedOptimizer
from dl_comm.tensorflow._training import learning_rate
from dl_comm.tensorflow._variables import BroadcastHook, broadcast_variables

__all__ = [
    "BroadcastHook",
    "DistributedOptimizer",
    "average",
    "barrier",
    "broadcast",
    "broadcast_variables",
    "check_buffers_match",
    "config_team",
    "core_id",
    "finalize",
    "get_localrank",
    "get_nranks",
    "get_rank",
    "gradients",
    "init",
    "init_mpi",
    "learning_rate",
    "local_rank",
    "rank",
    "size",
]

init = dl_comm.init
init_mpi = dl_comm.init_mpi
finalize = dl_comm.finalize
barrier = dl_comm.barrier
check_buffers_match = dl_comm.check_buffers_match
config_team = dl_comm.config_team


def get_rank() -> int:
    """Give the rank of this process, from 0; calls `dl_comm.init()` when nobody has."""
    ensure_initialized()
    return int(dl_comm.get_rank())


def get_nranks() -> int:
    """Give the number of processes; calls `dl_comm.init()` when nobody has."""
    ensure_initialized()
    return int(dl_comm.get_nranks())


def get_localrank() -> int:
    """Give the rank of this process among those of its host, from 0; calls `dl_comm.init()` when nobody has."""
    ensure_initialized()
    return int(dl_comm.get_localrank())


rank, size, local_rank = get_rank, get_nranks, get_localrank
