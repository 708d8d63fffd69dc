"""Batch normalization over the joined batch of all ranks: that of dl_comm, on CPUs and GPUs."""

from dl_comm.torch import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
