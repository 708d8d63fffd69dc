"""dl_comm for PyTorch: averages gradients over all ranks during backward.

    import dl_comm.torch as cdl

    cdl.broadcast_parameters(model)
    optimizer = cdl.DistributedOptimizer(optimizer)

The rest of the training script stays unchanged: after `backward()` the gradients are means, to read, clip and change.
Scripts for `torch.distributed` need none of this: `init_process_group("dl_comm")` (docs/torch.md).
Importing this module loads torch and its op library. It builds the library first if the installation has none.
"""

from __future__ import annotations

from dl_comm._api.averages import check_buffers_match
from dl_comm._api.init import init
from dl_comm._arrays.collectives import barrier
from dl_comm._arrays.groups import Group
from dl_comm._arrays.objects import all_gather_object, gather_object
from dl_comm._arrays.teams import config_team
from dl_comm._arrays.work import Status
from dl_comm._job.end import finalize
from dl_comm._job.ranks import get_localrank, get_nranks, get_rank, local_rank, rank, size
from dl_comm._job.start import init_mpi
from dl_comm._levels.split import split
from dl_comm.torch import nn
from dl_comm.torch._asynchronous import EASGD, Downpour
from dl_comm.torch._batch_norm import SyncBatchNorm
from dl_comm.torch._collectives import (
    all_gather,
    all_to_all,
    allreduce,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from dl_comm.torch._engine import Engine, EngineState
from dl_comm.torch._functions import (
    average,
    broadcast,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    gradients,
)
from dl_comm.torch._messages import recv, send, sendrecv
from dl_comm.torch._optimizer import AveragingOptimizer, DistributedOptimizer
from dl_comm.torch._reducer import Communication
from dl_comm.torch._training import load_checkpoint, lr_scheduler, save_checkpoint
from dl_comm.torch._work import Work
from dl_comm.training import DistributedSampler
from dl_comm_torch_backend import register_if_available

__all__ = [
    "EASGD",
    "AveragingOptimizer",
    "Communication",
    "DistributedOptimizer",
    "DistributedSampler",
    "Downpour",
    "Engine",
    "EngineState",
    "Group",
    "Status",
    "SyncBatchNorm",
    "Work",
    "all_gather",
    "all_gather_object",
    "all_to_all",
    "allreduce",
    "average",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "check_buffers_match",
    "config_team",
    "finalize",
    "gather",
    "gather_object",
    "get_localrank",
    "get_nranks",
    "get_rank",
    "gradients",
    "init",
    "init_mpi",
    "load_checkpoint",
    "local_rank",
    "lr_scheduler",
    "nn",
    "rank",
    "recv",
    "reduce",
    "reduce_scatter",
    "save_checkpoint",
    "scatter",
    "send",
    "sendrecv",
    "size",
    "split",
]


def __dir__() -> list[str]:
    return sorted(__all__)


# For a torch that runs no entry points (TORCH_DEVICE_BACKEND_AUTOLOAD=0).
register_if_available()
