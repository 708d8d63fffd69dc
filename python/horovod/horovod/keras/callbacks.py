"""Callbacks of `horovod.keras`, for ``model.fit`` on all ranks.

    hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    hvd.callbacks.MetricAverageCallback()
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1 * hvd.size(), warmup_epochs=3)

Thread rule: as Keras's callbacks, which run on the training thread.
"""

from __future__ import annotations

from typing import Any

from horovod import _keras as _shared

_Callback: Any = _shared.keras_module().callbacks.Callback
_Checkpoint: Any = _shared.keras_module().callbacks.ModelCheckpoint

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(_shared.BroadcastGlobalVariables, _Callback):  # type: ignore[misc]
    """Broadcasts the model and its optimizer after the first batch.

    Args:
        root_rank: The rank that has the values.
        device: Not used.
        local_variables: A variable, or several, that each rank keeps.
    """


class MetricAverageCallback(_shared.MetricAverage, _Callback):  # type: ignore[misc]
    """Averages the logs of an epoch over the ranks. Put it before callbacks that decide by them.

    Args:
        device: Not used.
    """


class LearningRateScheduleCallback(_shared.LearningRateSchedule, _Callback):  # type: ignore[misc]
    """Multiplies the initial learning rate by a factor.

    Args:
        initial_lr: The initial rate.
        multiplier: A function of the epoch, or a base of which the power is the epochs since ``start_epoch``.
        start_epoch: The first epoch.
        end_epoch: The first epoch that is not in it; None: no end.
        staircase: Set the rate once in each epoch; else in each batch.
        momentum_correction: Scale a momentum that is a variable with the rate, for one batch.
        steps_per_epoch: Batches in an epoch; None: as the data say.
    """


class LearningRateWarmupCallback(_shared.LearningRateWarmup, _Callback):  # type: ignore[misc]
    """Raises the learning rate from ``initial_lr / size`` to ``initial_lr``.

    Args:
        initial_lr: The rate after the warm-up.
        warmup_epochs: Its length.
        momentum_correction: Scale a momentum that is a variable with the rate, for one batch.
        steps_per_epoch: Batches in an epoch; None: as the data say.
        verbose: 1: print a line at the end, on rank 0.
    """


class BestModelCheckpoint(_Checkpoint):  # type: ignore[misc]
    """``ModelCheckpoint`` that saves the best model only. ``filepath`` may also be set later.

    Args:
        monitor, verbose, mode, save_freq: As of ``ModelCheckpoint``.
        filepath: Where to save it.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: Any = "epoch",
        filepath: str = "best.keras",
    ) -> None:
        super().__init__(filepath, monitor, verbose, True, False, mode, save_freq)
