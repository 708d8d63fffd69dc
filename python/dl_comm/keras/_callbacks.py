"""Callbacks for `model.fit`: the same start on every rank, and the same metrics.

Thread rule: as Keras's for callbacks, which run on the thread that trains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dl_comm
from dl_comm._process import ensure_initialized
from dl_comm.keras._optimizer import has_started, retrace_train_step, shared_state
from dl_comm.tensorflow import _ops, broadcast_variables


class BroadcastCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Gives the model and its optimizer the values of rank `root` before the first update of every `fit`.

    It covers weights (trainable or not) and optimizer variables (iterations, learning rate, slots), but not the state
    of random seeds, so that dropout differs between ranks, nor that of metrics. A model that has no variables yet is
    built from the first batch's shapes before the broadcast; variables that come into being later, in the first step,
    are broadcast after it. Put it first in the list of callbacks, on every rank.

    It also switches off the XLA compilation of the training step, which dl_comm's ops cannot be part of, and has Keras
    trace a step again that may be older than the `DistributedOptimizer`.

    Raises (out of `fit`): tf.errors.OpError; see `dl_comm.tensorflow`.
    """

    def __init__(self, root: int = 0) -> None:
        """Remember whose values count."""
        super().__init__()
        self._root = root
        self._count: int | None = None

    def set_model(self, model: Any) -> None:
        """Take the model, and switch off XLA; Keras calls it before it makes the training step."""
        super().set_model(model)
        if getattr(model, "compiled", False) and model.jit_compile:
            model.jit_compile = False
            model.train_function = None
        retrace_train_step(model)

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast, or, when the model has no variables yet, arrange for it."""
        ensure_initialized()
        if self.model.built:
            self._broadcast()
        else:
            self.model.train_function = self._build_first(self.model.train_function)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """After the first batch: broadcast again if that batch made variables which could not be known before."""
        if self._count is not None and len(_variables(self.model)) != self._count:
            self._broadcast()
        self._count = None

    def _broadcast(self) -> None:
        self._build_optimizer_if_resumed()
        variables = _variables(self.model)
        self._count = len(variables)
        if variables:
            broadcast_variables(variables, self._root, name="BroadcastCallback")
            has_started(self.model.optimizer)

    def _build_optimizer_if_resumed(self) -> None:
        # Where one rank has loaded the state of an optimizer, the others need the variables to take it. Nowhere else:
        # Keras builds an optimizer for good, and a model may still get variables in its first step.
        optimizer = self.model.optimizer
        built = optimizer is not None and optimizer.built
        somewhere = float(_ops.average(float(built), name="BroadcastCallback optimizer")) > 0
        if somewhere and optimizer is not None and not built and self.model.trainable_variables:
            optimizer.build(self.model.trainable_variables)

    def _build_first(self, train_function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        # The variables of a deferred model come into being in its first step, which would update them before they are
        # the same. Tracing the forward pass on the shapes of the data makes them without taking a batch.
        model = self.model

        def first_step(iterator: Any) -> Any:
            model.train_function = train_function
            x, _, _ = keras.utils.unpack_x_y_sample_weight(iterator.element_spec)
            # As Keras's own train_step calls it.
            training = {"training": True} if getattr(model, "_call_has_training_arg", False) else {}
            tf.function(lambda inputs: model(inputs, **training), autograph=False).get_concrete_function(x)
            self._broadcast()
            return train_function(iterator)

        return first_step


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Averages the logs of an epoch over the ranks, validation metrics too, for the callbacks after it in the list.

    EarlyStopping, ReduceLROnPlateau, ModelCheckpoint and the history then see the same on every rank, and decide the
    same. Put it before them, on every rank. Keras draws its progress bar after it as well, from the averages.

    With `weight`, the number of this rank's samples for instance, the averages are weighted; without, each rank counts
    the same. Raises (out of `fit`) dl_comm.MismatchError when the ranks' logs have different names, and other errors as
    `dl_comm.average_metrics` does.
    """

    def __init__(self, weight: float = 1.0) -> None:
        """Remember how much this rank counts."""
        super().__init__()
        self._weight = weight

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace the values in `logs` by their averages."""
        if logs is not None:
            logs.update(average_logs(logs, self._weight))


class StatsCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Adds dl_comm's numbers to the logs of every epoch, so that the history has them, and writes them as curves.

    The names and values are those of `dl_comm.StatsWriter`: `dl_comm/exposed` is the share of the epoch in which this
    rank waited for communication, `dl_comm/overlap` the share of communication that computation hid, and so on. Put it
    after MetricAverageCallback, which would average them too.
    """

    def __init__(self, writer: Any = None) -> None:
        """Remember where curves go: see `dl_comm.StatsWriter`; None for the logs alone."""
        super().__init__()
        self._writer = writer
        self._stats: dl_comm.StatsWriter | None = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Start to count."""
        ensure_initialized()
        self._stats = dl_comm.StatsWriter(self._writer)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Write what this epoch did, and add it to `logs`."""
        if self._stats is not None:
            values = self._stats.write(epoch)
            if logs is not None:
                logs.update(values)


def average_logs(logs: dict[str, Any], weight: float = 1.0) -> dict[str, Any]:
    """Average a dict of metrics, such as `model.evaluate(..., return_dict=True)` gives, over the ranks.

    Does what `dl_comm.average_metrics` does, which see, with all that is a single number; the rest comes back as it is.
    Calls `dl_comm.init()` when nobody has. Eager only.
    """
    ensure_initialized()
    numbers = {name: value for name, value in logs.items() if _is_number(value)}
    return {**logs, **dl_comm.average_metrics(numbers, weight)}


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
    # `weights` leaves out the states of metrics and random seeds, which `variables` has.
    return [*model.weights, *shared_state(optimizer)]
