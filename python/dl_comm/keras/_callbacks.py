"""Callbacks for `model.fit`: equal initial values and equal metrics on all ranks.

Thread rule: as Keras's callbacks, which run on the training thread.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from dl_comm._arrays.groups import Group
from dl_comm._arrays.metrics import any_rank, average_metrics
from dl_comm._job.start import ensure_initialized
from dl_comm._job.stats_writer import StatsWriter
from dl_comm.keras._backend import check, on
from dl_comm.keras._optimizer import group_of, has_started, retrace_train_step, shared_state


class BroadcastCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Broadcasts the model and its optimizer from rank `root` before the first update of every `fit`.

    It covers weights (trainable or not) and optimizer variables (iterations, learning rate, slots). It does not cover
    random seeds, so dropout differs between ranks, nor the state of metrics. A model without variables is built from
    the shapes of the first batch before the broadcast; variables that the first step creates are broadcast after that
    step. Put it first in the list of callbacks, on every rank.

    It also disables the compiler of the training step, which cannot compile dl_comm's ops, except on jax; and makes
    Keras trace the step again if the trace may be older than the `DistributedOptimizer`.

    `group`: the ranks that take part; `root` is a rank of the group. None: those of the model's `DistributedOptimizer`,
    else all.

    Raises (from `fit`): `dl_comm.CommError`.
    """

    def __init__(self, root: int = 0, *, group: Group | None = None) -> None:
        """Store the root and the group."""
        check()
        super().__init__()
        self._root, self._group = root, group
        self._count: int | None = None

    def set_model(self, model: Any) -> None:
        """Store the model, and disable compilation; Keras calls this before it creates the training step."""
        super().set_model(model)
        if not on.compiles and getattr(model, "compiled", False) and model.jit_compile:
            model.jit_compile = False
            model.train_function = None
        retrace_train_step(model)

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast; for a model without variables, defer the broadcast to the first step."""
        ensure_initialized()
        if self.model.built:
            self._broadcast()
        else:
            self.model.train_function = on.build_first(self.model, self.model.train_function, self._broadcast)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """After the first batch: broadcast again if that batch created variables."""
        if self._count is not None and len(_variables(self.model)) != self._count:
            self._broadcast()
        self._count = None

    def _ranks(self) -> Group | None:
        return self._group or group_of(self.model.optimizer)

    def _broadcast(self) -> None:
        self._build_optimizer_if_resumed()
        variables = _variables(self.model)
        self._count = len(variables)
        if variables:
            on.broadcast(variables, self._root, "BroadcastCallback", self._ranks())
            has_started(self.model.optimizer)

    def _build_optimizer_if_resumed(self) -> None:
        # If one rank has loaded an optimizer state, the others need the variables to receive it. Otherwise do not
        # build: Keras builds an optimizer only once, and the first step may still create variables.
        optimizer = self.model.optimizer
        built = optimizer is not None and optimizer.built
        if (
            any_rank(built, group=self._ranks())
            and optimizer is not None
            and not built
            and self.model.trainable_variables
        ):
            optimizer.build(self.model.trainable_variables)


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Averages the logs of an epoch over the ranks, with validation metrics, for later callbacks in the list.

    EarlyStopping, ReduceLROnPlateau, ModelCheckpoint and the history then see the same values on every rank, and make
    the same decisions. Put it before them, on every rank. Keras's progress bar also shows the means.

    `weight` (for example this rank's number of samples) weights the means; by default all ranks have the same weight.
    `group`: the ranks that take part; None: all.
    Raises (from `fit`) dl_comm.MismatchError when the ranks' logs have different names; other errors as
    `dl_comm.average_metrics`.
    """

    def __init__(self, weight: float = 1.0, *, group: Group | None = None) -> None:
        """Store the weight of this rank, and the group."""
        super().__init__()
        self._weight, self._group = weight, group

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace the values in `logs` by their means."""
        if logs is not None:
            logs.update(average_logs(logs, self._weight, group=self._group))


class StatsCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Adds communication statistics to the logs and history of every epoch, and writes them as curves.

    Names and values are those of `dl_comm.StatsWriter`: for example `dl_comm/exposed` is the fraction of the epoch that
    this rank waited for communication, `dl_comm/overlap` the fraction of communication that computation hid. Put it
    after MetricAverageCallback, which would average these numbers.
    """

    def __init__(self, writer: Any = None) -> None:
        """Store the writer of the curves: see `dl_comm.StatsWriter`; None: logs only."""
        super().__init__()
        self._writer = writer
        self._stats: StatsWriter | None = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Start an interval."""
        ensure_initialized()
        self._stats = StatsWriter(self._writer)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Write the statistics of this epoch, and add them to `logs`."""
        if self._stats is not None:
            values = self._stats.write(epoch)
            if logs is not None:
                logs.update(values)


def average_logs(logs: dict[str, Any], weight: float = 1.0, *, group: Group | None = None) -> dict[str, Any]:
    """Average a dict of metrics, such as that of `model.evaluate(..., return_dict=True)`, over the ranks.

    Applies `dl_comm.average_metrics` to the entries that are single numbers, and returns the others unchanged. Calls
    `dl_comm.init()` if needed. Eager mode only.
    """
    ensure_initialized()
    numbers = {name: value for name, value in logs.items() if _is_number(value)}
    return {**logs, **average_metrics(numbers, weight, group=group)}


def _is_number(value: Any) -> bool:
    if isinstance(value, (str, bytes, bool)) or value is None:
        return False
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        return False
    return array.ndim == 0 and array.dtype.kind in "fiu"


def _variables(model: Any) -> list[Any]:
    optimizer = model.optimizer
    if optimizer is None:
        return list(model.weights)
    # `variables` would include the states of metrics and random seeds; `weights` does not.
    return [*model.weights, *shared_state(optimizer)]
