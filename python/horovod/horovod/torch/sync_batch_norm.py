"""Batch normalization over the joined batch of all ranks: that of dl_comm, on CPUs and GPUs."""

from __future__ import annotations

from dl_comm.torch import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
