"""Elastic training with `horovod.keras`: its state and callbacks work, ``run`` does not yet.

    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    state.sync()
    model.fit(..., callbacks=[hvd.elastic.UpdateEpochStateCallback(state), hvd.elastic.CommitStateCallback(state, 10)])

Put ``CommitStateCallback`` last: it saves what the others have set. Thread rule: the training thread; ``sync`` is
collective.
"""

from __future__ import annotations

from typing import Any

from horovod._keras import KerasState
from horovod.common.elastic import State, run
from horovod.keras.callbacks import _Callback

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]


class CommitStateCallback(_Callback):  # type: ignore[misc]
    """Commits a state after every so many batches, and after each epoch.

    Args:
        state: The state.
        batches_per_commit: The number of batches, from the start of ``fit``.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        if batches_per_commit < 1:
            raise ValueError(f"batches_per_commit is {batches_per_commit}: at least 1")
        self.state, self.batches_per_commit, self._batches = state, batches_per_commit, 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Counts from here."""
        self._batches = 0

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commits, if it is time."""
        self._batches += 1
        if self._batches % self.batches_per_commit == 0:
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commits."""
        self.state.commit()


class UpdateBatchStateCallback(_Callback):  # type: ignore[misc]
    """Sets ``state.batch`` to the number of the last batch, and to 0 after an epoch.

    Differs from Horovod's: it does not try to shorten the epoch that a restored state is in, as ``fit`` of current
    Keras runs all batches in any case.

    Args:
        state: The state, with ``batch``.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Sets the number."""
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Sets 0."""
        self.state.batch = 0


class UpdateEpochStateCallback(_Callback):  # type: ignore[misc]
    """Sets ``state.epoch`` to the number of epochs that are done, those before this ``fit`` included.

    Args:
        state: The state, with ``epoch``.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state, self._before = state, state.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        """Counts from the epoch of the state."""
        self._before = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Sets the number."""
        self.state.epoch = self._before + epoch + 1
