"""Elastic training with `horovod.keras`: not yet. The names can be imported; their use raises NotImplementedError."""

from horovod.common.elastic import NotYet, run

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]

KerasState = CommitStateCallback = UpdateBatchStateCallback = UpdateEpochStateCallback = NotYet
