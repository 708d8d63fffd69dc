"""The names that ``dl_comm`` lists, which it imports on first use. Loads the core.

So ``python -m dl_comm.run`` starts fast, and also where the core cannot be loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dl_comm import timeline, training
from dl_comm._api.averages import average, broadcast, equal_on_all_ranks, gradients
from dl_comm._api.init import init
from dl_comm._api.methods import world
from dl_comm._api.parameter_server import ParameterServer
from dl_comm._api.replicas import check_replicas
from dl_comm._arrays.checkpoint import rank0_path, rank_path, read_on_rank0, write_on_rank0
from dl_comm._arrays.collectives import barrier
from dl_comm._arrays.groups import Group, join
from dl_comm._arrays.memory import shared_memory, shared_zeros
from dl_comm._arrays.metrics import any_rank, average_metrics
from dl_comm._arrays.objects import all_gather_object, broadcast_object, gather_object
from dl_comm._arrays.random_states import random_states, set_random_states
from dl_comm._arrays.teams import set_timeout
from dl_comm._arrays.work import Status, Work, synchronize
from dl_comm._base.array_types import Operator
from dl_comm._base.errors import (
    ArgumentError,
    CommError,
    DTypeError,
    MismatchError,
    PeerLostError,
    RankFailedError,
    StateError,
    TimeoutError,  # noqa: A004 - a subclass of the builtin
    error_of,
)
from dl_comm._base.paths import get_cmake_dir, get_include
from dl_comm._base.rc import rc
from dl_comm._dl_comm import __version__
from dl_comm._job.diagnosis import dump, stats, topology
from dl_comm._job.end import finalize
from dl_comm._job.output import get_logger, print0
from dl_comm._job.ranks import (
    is_initialized,
    local_rank,
    local_size,
    num_hosts,
    rank,
    size,
)
from dl_comm._job.stats_writer import StatsWriter
from dl_comm._levels.communicators import Grid, grid
from dl_comm._levels.split import split

if not TYPE_CHECKING:
    # Not `run`, the package that can be called: it is imported by its own first use.
    from dl_comm._api.dispatch import (
        all_gather,
        all_to_all,
        allreduce,
        gather,
        recv,
        reduce,
        reduce_scatter,
        scatter,
        send,
        sendrecv,
    )
else:
    # Type checkers and the documentation read these.
    from dl_comm._arrays.collectives import (
        all_gather,
        all_to_all,
        allreduce,
        gather,
        reduce,
        reduce_scatter,
        scatter,
    )
    from dl_comm._arrays.messages import recv, send, sendrecv
    from dl_comm.run import run

MAIN = (
    *("init", "finalize", "world", "Group", "Grid", "join", "run", "ParameterServer"),
    *("allreduce", "reduce", "all_gather", "gather", "reduce_scatter", "scatter", "all_to_all", "broadcast", "barrier"),
    *("send", "recv", "sendrecv", "broadcast_object", "all_gather_object", "gather_object"),
    *("CommError", "MismatchError", "TimeoutError", "PeerLostError", "RankFailedError", "StateError"),
    *("ArgumentError", "DTypeError", "error_of"),
)
"""What ``dir`` and the first table of the reference show: enough for most scripts."""

__all__ = [
    "ArgumentError",
    "CommError",
    "DTypeError",
    "Grid",
    "Group",
    "MismatchError",
    "Operator",
    "ParameterServer",
    "PeerLostError",
    "RankFailedError",
    "StateError",
    "StatsWriter",
    "Status",
    "TimeoutError",
    "Work",
    "__version__",
    "all_gather",
    "all_gather_object",
    "all_to_all",
    "allreduce",
    "any_rank",
    "average",
    "average_metrics",
    "barrier",
    "broadcast",
    "broadcast_object",
    "check_replicas",
    "dump",
    "equal_on_all_ranks",
    "error_of",
    "finalize",
    "gather",
    "gather_object",
    "get_cmake_dir",
    "get_include",
    "get_logger",
    "gradients",
    "grid",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "num_hosts",
    "print0",
    "random_states",
    "rank",
    "rank0_path",
    "rank_path",
    "rc",
    "read_on_rank0",
    "recv",
    "reduce",
    "reduce_scatter",
    "run",
    "scatter",
    "send",
    "sendrecv",
    "set_random_states",
    "set_timeout",
    "shared_memory",
    "shared_zeros",
    "size",
    "split",
    "stats",
    "synchronize",
    "timeline",
    "topology",
    "training",
    "world",
    "write_on_rank0",
]
