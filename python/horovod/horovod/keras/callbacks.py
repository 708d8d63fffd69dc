"""Callbacks of `horovod.keras`, for ``model.fit`` on all ranks.

    hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    hvd.callbacks.MetricAverageCallback()
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1 * hvd.size(), warmup_epochs=3)

Thread rule: as Keras's callbacks, which run on the training thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from horovod import _keras as _shared
from horovod.common import _job
from horovod.common.exceptions import translated

__all__ = ["BestModelCheckpoint", "BroadcastGlobalVariablesCallback", "LearningRateScheduleCallback"]
__all__ += ["LearningRateWarmupCallback", "MetricAverageCallback"]

_Callback: Any = _shared.keras_module().callbacks.Callback
_Checkpoint: Any = _shared.keras_module().callbacks.ModelCheckpoint


class BroadcastGlobalVariablesCallback(_Callback):  # type: ignore[misc]
    """Broadcasts the model and its optimizer after the first batch.

    Args:
        root_rank: The rank that has the values.
        device: Not used.
        local_variables: A variable, or several, that each rank keeps.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        listed = [local_variables] if hasattr(local_variables, "assign") else list(local_variables or ())
        if not all(hasattr(each, "assign") for each in listed):
            raise ValueError("local_variables are variables")
        self.root_rank, self.device, self.broadcast_done = root_rank, device, False
        self._local = {id(each): each for each in listed}

    def register_local_var(self, var: Any) -> None:
        """Leaves the value of a variable to this rank."""
        self._local[id(var)] = var

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """After the first batch: broadcasts."""
        if self.broadcast_done:
            return
        model, optimizer = self.model, getattr(self.model, "optimizer", None)
        own = [] if optimizer is None else _shared.variables_of(optimizer)
        self.broadcast_done = True
        variables = [each for each in [*model.weights, *own] if id(each) not in self._local]
        _shared.broadcast(variables, self.root_rank)


class MetricAverageCallback(_Callback):  # type: ignore[misc]
    """Averages the logs of an epoch over the ranks. Put it before callbacks that decide by them.

    Args:
        device: Not used.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replaces the values in ``logs`` by their means."""
        if logs:
            with translated():
                logs.update(_job.current().world.average_metrics({name: float(logs[name]) for name in sorted(logs)}))


class LearningRateScheduleCallback(_Callback):  # type: ignore[misc]
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

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr is required")
        self.initial_lr, self.momentum_correction, self.staircase = initial_lr, momentum_correction, staircase
        self.start_epoch, self.end_epoch, self.current_epoch = start_epoch, end_epoch, 0
        self.steps_per_epoch = steps_per_epoch
        self.multiplier: Callable[[float], float] = (
            multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        )
        self._momentum: float | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Finds the number of steps in an epoch."""
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(f"{type(self).__name__} needs steps_per_epoch: the data do not say it")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes the epoch."""
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Sets the learning rate: of each batch, with ``staircase`` of each epoch."""
        end = self.end_epoch
        if self.current_epoch < self.start_epoch or end is not None and self.current_epoch >= end:
            return
        if self.staircase and batch:
            return
        epoch = self.current_epoch + (0.0 if self.staircase else batch / (self.steps_per_epoch or 1))
        optimizer = self.model.optimizer
        old, new = float(optimizer.learning_rate), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate.assign(new)
        momentum: Any = getattr(optimizer, "momentum", None)
        # A momentum that is a number is part of the traced step.
        if self.momentum_correction and hasattr(momentum, "assign") and old:
            self._momentum = float(momentum)
            momentum.assign(self._momentum * new / old)

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Takes back the correction of the momentum."""
        if self._momentum is not None:
            self.model.optimizer.momentum.assign(self._momentum)
            self._momentum = None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the learning rate to the logs, as ``lr``."""
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from ``initial_lr / size`` to ``initial_lr``.

    Args:
        initial_lr: The rate after the warm-up.
        warmup_epochs: Its length.
        momentum_correction: Scale a momentum that is a variable with the rate, for one batch.
        steps_per_epoch: Batches in an epoch; None: as the data say.
        verbose: 1: print a line at the end, on rank 0.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            size = _job.current().size
            # A round number at the end of each epoch.
            epoch += 1.0 / (self.steps_per_epoch or 1)
            return (epoch * (size - 1) / warmup_epochs + 1) / size

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the learning rate to the logs; prints a line after the last epoch of the warm-up."""
        super().on_epoch_end(epoch, logs)
        if epoch == (self.end_epoch or 0) - 1 and self.verbose > 0 and _job.current().rank == 0:
            rate = float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


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
