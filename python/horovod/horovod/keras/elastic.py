"""Elastic training with `horovod.keras`: not yet. The names can be imported; their use raises NotImplementedError."""

from __future__ import annotations

from horovod.common.elastic import ObjectState, _NotYet, run

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]


class KerasState(ObjectState):
    """The state of a model and its optimizer. Not yet."""


class CommitStateCallback(_NotYet):
    """Commits the state after some batches. Not yet."""


class UpdateBatchStateCallback(_NotYet):
    """Keeps the number of the batch in the state. Not yet."""


class UpdateEpochStateCallback(_NotYet):
    """Keeps the number of the epoch in the state. Not yet."""
