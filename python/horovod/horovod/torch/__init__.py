"""Horovod for PyTorch, on dl_comm.

    import horovod.torch as hvd

    hvd.init()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

Importing it loads torch and dl_comm's op library.
"""

from __future__ import annotations

import torch

from horovod.torch import elastic, mpi_ops
from horovod.torch.compression import Compression
from horovod.torch.functions import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from horovod.torch.mpi_ops import *  # noqa: F403 (its __all__)
from horovod.torch.optimizer import DistributedOptimizer
from horovod.torch.sync_batch_norm import SyncBatchNorm

__all__ = [*mpi_ops.__all__, "Compression", "DistributedOptimizer", "SyncBatchNorm", "allgather_object", "elastic"]
__all__ += ["broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]


def _check_has_gpu() -> bool:
    return torch.cuda.is_available()
