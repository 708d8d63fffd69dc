"""`DistributedOptimizer` for Keras: a subclass, made at run time, of the class of the optimizer that is given.

Where the average happens: before loss unscaling, clipping, weight decay and the update, so that all of them see what
one process with the whole batch would see. With `gradient_accumulation_steps` it happens once for each update, on the
accumulated gradients, before clipping.

Thread rule: as Keras's for optimizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

import dl_comm
from dl_comm.tensorflow import _ops


class _Averaging:
    """What is added to an optimizer's class. It must stand before that class among the bases."""

    _dl_comm_team = 0
    _dl_comm_complete = False
    _dl_comm_inside_loss_scale = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._dl_comm_complete = True

    def __setattr__(self, name: str, value: Any) -> None:
        # A LossScaleOptimizer that takes this one in does just that, and it then calls `apply` only on those ranks
        # whose gradients are finite: the others would never average.
        if name == "loss_scale_factor" and value is None and self._dl_comm_complete:
            self._dl_comm_inside_loss_scale = True
        super().__setattr__(name, value)

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Average the gradients over the ranks, then do what the wrapped class does."""
        if self._dl_comm_inside_loss_scale:
            raise RuntimeError(
                "a DistributedOptimizer cannot be inside a LossScaleOptimizer (which Keras adds by itself under the "
                "policy mixed_float16): give DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))"
            )
        grads = list(grads)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        if not self.gradient_accumulation_steps:  # type: ignore[attr-defined]
            known = self._trainable_variables if trainable_variables is None else trainable_variables  # type: ignore[attr-defined]
            if len(grads) == len(known):  # else the wrapped class says what is wrong
                grads = _ops.average_present(grads, known, self._dl_comm_team)
        super().apply(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        # The one place that sees the accumulated gradients before they are clipped.
        if self.gradient_accumulation_steps:  # type: ignore[attr-defined]
            grads = _ops.average_present(list(grads), [None] * len(grads), self._dl_comm_team)
        return super()._clip_gradients(grads)  # type: ignore[misc]


def DistributedOptimizer(optimizer: Any, team: int = 0) -> Any:  # noqa: N802 (a class to those who call it)
    """Wrap a Keras optimizer so that it averages gradients over all ranks before it applies them.

    The new optimizer is made from the configuration of the given one and takes over its state when it has some. Its
    class is a subclass of the given one's, under the same name, so that a saved model does not need dl_comm: it loads
    with the plain optimizer. `dl_comm.keras.load_model` loads it with the distributed one.

    Each rank's gradients count the same: give all ranks batches of the same size. Variables without a gradient are
    skipped; all ranks must skip the same. For mixed_float16 wrap the LossScaleOptimizer:
    `DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))`.

    XLA cannot compile the average. Keras compiles by default only where it sees a GPU; `BroadcastCallback` switches
    that off, and without it `model.compile(..., jit_compile=False)` does.

    Args:
        optimizer: A Keras optimizer, or a name such as "adam".
        team: The thread team that averages.

    Raises:
        TypeError: It is not a Keras 3 optimizer.
        ValueError: It is wrapped already, or there is no optimizer of that name.
        RuntimeError: In training: the function is compiled by XLA, or a LossScaleOptimizer was put around.
        tf.errors.OpError: In training; see `dl_comm.tensorflow`.
    """
    if isinstance(optimizer, str):
        optimizer = keras.optimizers.get(optimizer)
    if isinstance(optimizer, _Averaging):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"DistributedOptimizer takes a Keras 3 optimizer, not {type(optimizer).__name__}")
    if isinstance(getattr(optimizer, "inner_optimizer", None), _Averaging):
        raise ValueError("wrap the LossScaleOptimizer only, not the optimizer inside it as well")
    if not dl_comm.is_initialized():
        dl_comm.init()
    base = type(optimizer)
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    averaging = type(base.__name__, (_Averaging, base), {**names, "_dl_comm_team": int(team)})
    distributed = averaging.from_config(optimizer.get_config())  # type: ignore[attr-defined]
    _take_over(optimizer, distributed)
    return distributed


def load_model(filepath: Any, team: int = 0, **kwargs: Any) -> Any:
    """Load a saved model, and make its optimizer, with its state, a `DistributedOptimizer`.

    Takes the keyword arguments of `keras.models.load_model`, and raises what it raises. Every rank must be able to read
    the file; else load it on rank 0, compile a model of the same shape elsewhere, and use `BroadcastCallback`.
    """
    model = keras.models.load_model(filepath, **kwargs)
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, team)
    return model


def _take_over(old: Any, new: Any) -> None:
    _take_over_exclusions(old, new)
    if hasattr(old, "inner_optimizer"):
        _take_over_exclusions(old.inner_optimizer, new.inner_optimizer)
    if old.built:
        new.build(list(old._trainable_variables))
        for target, source in zip(new.variables, old.variables, strict=True):
            target.assign(source)


def _take_over_exclusions(old: Any, new: Any) -> None:
    # What exclude_from_weight_decay() set is not part of the configuration.
    for attribute in ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"):
        if hasattr(old, attribute):
            setattr(new, attribute, getattr(old, attribute))
