"""`DistributedOptimizer` for Keras: gives an optimizer a subclass, made at run time, of its class.

Where the average happens: before loss unscaling, clipping, weight decay and the update, so that all of them see what
one process with the whole batch would see. With `gradient_accumulation_steps` it happens once for each update, on the
accumulated gradients, before clipping.

The first `apply` gives all ranks the values of rank 0. In a training step that TensorFlow traces (`fit`, a
`tf.function`) that is while it is traced, before the step runs; in an eager loop it is after the first gradients, which
are then those of different weights.

Thread rule: as Keras's for optimizers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from dl_comm import ArgumentError, DTypeError
from dl_comm._process import checked_team, new_owner, start_team
from dl_comm.tensorflow import _ops, broadcast_variables


class AveragingOptimizer:
    """What is added to an optimizer's class. It must stand before that class among the bases."""

    _dl_comm_team = 0
    _dl_comm_owner = 0
    _dl_comm_wrapped = False
    _dl_comm_in_use = False
    _dl_comm_starts = False  # the next `apply` gives all ranks the values of rank 0

    def __setattr__(self, name: str, value: Any) -> None:
        # A LossScaleOptimizer that takes this one in does just that, and it then calls `apply` only on those ranks
        # whose gradients are finite: the others would never average.
        if name == "loss_scale_factor" and value is None and self._dl_comm_wrapped:
            raise ArgumentError(
                "a DistributedOptimizer cannot be inside a LossScaleOptimizer (which Keras adds by itself under the "
                "policy mixed_float16): give DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))"
            )
        super().__setattr__(name, value)

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Make the optimizer again, a `DistributedOptimizer` of its own on team 0."""
        return DistributedOptimizer(cls.__bases__[1].from_config(config, custom_objects))  # type: ignore[attr-defined]

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Average the gradients over the ranks, then do what the wrapped class does."""
        grads = list(grads)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        if self._dl_comm_starts and grads:
            self._dl_comm_starts = False
            _start_from_rank_0(self, trainable_variables)
        if not self.gradient_accumulation_steps:  # type: ignore[attr-defined]
            known = self._trainable_variables if trainable_variables is None else trainable_variables  # type: ignore[attr-defined]
            if len(grads) == len(known):  # else the wrapped class says what is wrong
                grads = _ops.average_non_none(grads, known, self._dl_comm_team, self._dl_comm_owner)
        super().apply(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        # The one place that sees the accumulated gradients before they are clipped.
        if self.gradient_accumulation_steps:  # type: ignore[attr-defined]
            grads = _ops.average_non_none(list(grads), [None] * len(grads), self._dl_comm_team, self._dl_comm_owner)
        return super()._clip_gradients(grads)  # type: ignore[misc]


def DistributedOptimizer(  # noqa: N802 (a class to those who call it)
    optimizer: Any,
    team: int = 0,
    *,
    nstep: int | None = None,
    nteam: int = 1,
    nthread_per_team: int = 2,
    warmup: float = 0.10,
    verb: int = 2,
    freq: int = 100,
    broadcast: bool = True,
) -> Any:
    """Make a Keras optimizer average gradients over all ranks before it applies them, and return it.

    The optimizer stays the object that it was, with its state and its schedule. Its class is from now on a subclass of
    what it was, under the same name, so that a saved model does not need dl_comm: it loads with the plain optimizer.
    `dl_comm.keras.load_model` loads it with the distributed one. Wrap before `compile`: a training step that Keras has
    traced already does not average, until it is compiled again or trains with a `BroadcastCallback`.

    At its first update all ranks get the trainable variables and the optimizer's state of rank 0. `BroadcastCallback`
    does that for the whole model, with variables that are not trainable, and for another root.

    Each rank's gradients count the same: give all ranks batches of the same size. Variables without a gradient are
    skipped; all ranks must skip the same. For mixed_float16 wrap the LossScaleOptimizer:
    `DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))`.

    XLA cannot compile the average. Keras compiles by default only where it sees a GPU; `BroadcastCallback` switches
    that off, and without it `model.compile(..., jit_compile=False)` does.

    Args:
        optimizer: A Keras optimizer, or a name such as "adam".
        team: The thread team that averages; two optimizers that train at once (of a GAN, say) want one each.
        nstep: The number of steps in all; with it the team gets the schedule
            `dl_comm.config_team(team, 0, int(warmup * nstep), nstep, verb, freq)`: after the warm-up a step applies the
            averages that the step before has started, and waits for nothing.
        nteam: Teams to have at least.
        nthread_per_team: Threads of the teams that are made here.
        warmup: The share of the steps that wait for their own averages.
        verb: 1: rank 0 prints how long it has waited for communication, 2: every rank does, 0: none.
        freq: After how many steps each.
        broadcast: Start from the values of rank 0; False leaves each rank its own, which must be the same.

    Raises:
        DTypeError: It is not a Keras 3 optimizer.
        ArgumentError: It is wrapped already, the team is negative, there is no optimizer of that name, or loss scaling
            is to meet averages of the step before. Later: a LossScaleOptimizer is put around it.
        StateError: In training: the function is compiled by XLA.
        tf.errors.OpError: In training; see `dl_comm.tensorflow`.
    """
    if isinstance(optimizer, str):
        try:
            optimizer = keras.optimizers.get(optimizer)
        except ValueError as error:
            raise ArgumentError(f"Keras has no optimizer {optimizer!r}") from error
    if isinstance(optimizer, AveragingOptimizer):
        raise ArgumentError("the optimizer is a DistributedOptimizer already")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise DTypeError(f"DistributedOptimizer takes a Keras 3 optimizer, not {type(optimizer).__name__}")
    if isinstance(getattr(optimizer, "inner_optimizer", None), AveragingOptimizer):
        raise ArgumentError("wrap the LossScaleOptimizer only, not the optimizer inside it as well")
    if nstep is not None and warmup < 1 and hasattr(optimizer, "inner_optimizer"):
        raise ArgumentError(
            "a LossScaleOptimizer changes its scale, and averages that arrive a step later would be divided by the "
            "wrong one: leave nstep out, or give warmup=1.0"
        )
    team = checked_team(team)
    start_team(team, nteam, nthread_per_team, nstep, warmup, verb, freq)
    optimizer.__class__ = _averaging_class(type(optimizer))  # type: ignore[arg-type]
    optimizer._dl_comm_team = team
    optimizer._dl_comm_owner = new_owner(optimizer, team)
    optimizer._dl_comm_wrapped = True
    optimizer._dl_comm_starts = broadcast
    return optimizer


def shared_state(optimizer: Any) -> list[Any]:
    """The variables of an optimizer that are the same on all ranks: not what a rank has accumulated itself."""
    both = (optimizer, getattr(optimizer, "inner_optimizer", None))
    own = {id(variable) for each in both for variable in getattr(each, "_accumulated_gradients", None) or ()}
    return [variable for variable in optimizer.variables if id(variable) not in own]


@_ops.no_autograph
def _start_from_rank_0(optimizer: Any, variables: Sequence[Any] | None) -> None:
    variables = optimizer._trainable_variables if variables is None else variables
    # Now, not as a part of the step that is traced.
    with tf.init_scope():
        if not optimizer.built:
            optimizer.build(variables)
        broadcast_variables([*variables, *shared_state(optimizer)], 0, name="DistributedOptimizer start")


def has_started(optimizer: Any) -> None:
    """Take note that all ranks have the same values, so that the first update need not see to it."""
    if isinstance(optimizer, AveragingOptimizer):
        optimizer._dl_comm_starts = False


def retrace_train_step(model: Any) -> None:
    """Make Keras trace the training step anew when it may be of the time before `DistributedOptimizer`."""
    optimizer = getattr(model, "optimizer", None)
    if isinstance(optimizer, AveragingOptimizer) and not optimizer._dl_comm_in_use:
        optimizer._dl_comm_in_use = True
        model.train_function = None


def load_model(filepath: Any, team: int = 0, **kwargs: Any) -> Any:
    """Load a saved model, and make its optimizer, with its state, a `DistributedOptimizer`.

    Takes the keyword arguments of `keras.models.load_model`, and raises what it raises. Every rank must be able to read
    the file; else load it on rank 0, compile a model of the same shape elsewhere, and use `BroadcastCallback`.
    """
    model = keras.models.load_model(filepath, **kwargs)
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, team)
        retrace_train_step(model)
    return model


@functools.cache
def _averaging_class(base: type[Any]) -> type[Any]:
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (AveragingOptimizer, base), names)
