"""`DistributedOptimizer` for Keras: changes an optimizer's class to a subclass created at run time.

The allreduce runs before loss unscaling, clipping, weight decay and the update. So these see the same gradients as one
process with the whole batch. With `gradient_accumulation_steps` it runs once per update, on the accumulated gradients,
before clipping.

The first `apply` broadcasts the values of rank 0. In a training step that TensorFlow traces (`fit`, a `tf.function`)
the broadcast runs during tracing, before the step. In an eager loop it runs after the first gradients, which then
belong to different weights; so on torch, where each step runs eagerly. On jax a traced step cannot broadcast: it
needs a `BroadcastCallback`.

Thread rule: as Keras's optimizers.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import keras

from dl_comm._arrays.groups import Group
from dl_comm._arrays.teams import new_owner, start_averages
from dl_comm._arrays.tensor_names import agreed_order
from dl_comm._base.checks import checked_threads
from dl_comm._base.errors import ArgumentError, DTypeError, StateError
from dl_comm._job import state
from dl_comm.keras._backend import NAME, check, names_of, on, untraced
from dl_comm.keras._normalization import layers_of


class AveragingOptimizer:
    """Mix-in for an optimizer's class. It must precede that class in the list of bases."""

    _dl_comm_team = 0  # may stand for a group, see `groups.averaging_team`
    _dl_comm_group: Group | None = None
    _dl_comm_is_of_group = False
    _dl_comm_owner = 0
    _dl_comm_name = ""  # the same on all ranks, for the calls of this optimizer
    _dl_comm_wrapped = False
    _dl_comm_in_use = False
    _dl_comm_starts = False  # the next `apply` broadcasts the values of rank 0
    _dl_comm_places: dict[str, int] | None = None  # the order of the variables on all ranks, once it is known
    _dl_comm_applied: Sequence[Any] = ()  # the variables that the current `apply` updates

    def __setattr__(self, name: str, value: Any) -> None:
        # A LossScaleOptimizer sets this on its inner optimizer. It calls the inner `apply` only on ranks with finite
        # gradients, so the other ranks would never join the allreduce.
        if name == "loss_scale_factor" and value is None and self._dl_comm_wrapped:
            raise ArgumentError(
                "a DistributedOptimizer cannot be inside a LossScaleOptimizer (which Keras adds with the policy "
                "mixed_float16): use DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))"
            )
        super().__setattr__(name, value)

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Create the optimizer again, as a new `DistributedOptimizer` on team 0.

        Raises ArgumentError for one of a group, which a config does not have.
        """
        if cls._dl_comm_is_of_group:
            raise ArgumentError(
                "the config of an optimizer has no group: make it again by the class of Keras, and wrap it with group="
            )
        return DistributedOptimizer(cls.__bases__[1].from_config(config, custom_objects))  # type: ignore[attr-defined]

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Average the gradients over the ranks, then apply them as the wrapped class does."""
        grads = list(grads)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        known = self._trainable_variables if trainable_variables is None else trainable_variables  # type: ignore[attr-defined]
        if len(grads) == len(known):  # otherwise the wrapped class raises the error
            self._dl_comm_begin(grads, known)
            if self.gradient_accumulation_steps:  # type: ignore[attr-defined]
                applied = [each for grad, each in zip(grads, known, strict=True) if grad is not None]
                # Keras would count variables in an attribute among the optimizer's own.
                object.__setattr__(self, "_dl_comm_applied", applied)
            else:
                grads = self._dl_comm_average(grads, known)
        super().apply(grads, trainable_variables)  # type: ignore[misc]

    def stateless_apply(
        self, optimizer_variables: Sequence[Any], grads: Sequence[Any], trainable_variables: Sequence[Any]
    ) -> Any:
        """As the wrapped class does on jax; a LossScaleOptimizer does not call `apply` there."""
        known = self._trainable_variables  # type: ignore[attr-defined]
        if hasattr(self, "inner_optimizer") and len(grads) == len(known):
            grads = list(grads)
            self._dl_comm_begin(grads, known)
            grads = self._dl_comm_average(grads, known)
        return super().stateless_apply(optimizer_variables, grads, trainable_variables)  # type: ignore[misc]

    def _dl_comm_begin(self, grads: Sequence[Any], known: Sequence[Any]) -> None:
        if grads and self._dl_comm_places is None:
            self._dl_comm_places = _agreed_places(known, self._dl_comm_group)
        if self._dl_comm_starts and grads:
            _refuse_late_start(grads)
            self._dl_comm_starts = False
            _start_from_rank_0(self, known)

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        # The only hook that gets the accumulated gradients before clipping.
        if self.gradient_accumulation_steps:  # type: ignore[attr-defined]
            grads, applied = list(grads), self._dl_comm_applied
            # Keras applies the gradients of some variables, such as scales of float8, without this function.
            grads = self._dl_comm_average(grads, applied if len(applied) == len(grads) else [None] * len(grads))
        return super()._clip_gradients(grads)  # type: ignore[misc]

    def _dl_comm_average(self, grads: list[Any], variables: Sequence[Any]) -> list[Any]:
        places = self._dl_comm_places or {}
        found: list[Any] = on.average(
            grads, variables, self._dl_comm_team, self._dl_comm_owner, places, self._dl_comm_name
        )
        return found


def DistributedOptimizer(  # noqa: N802 (a class to those who call it)
    optimizer: Any,
    *,
    team: int = 0,
    group: Group | None = None,
    nstep: int | None = None,
    nteam: int = 1,
    nthread_per_team: int = 2,
    threads: int | None = None,
    warmup: float = 0.10,
    verb: int = 2,
    freq: int = 100,
    broadcast: bool = True,
) -> Any:
    """Make a Keras optimizer average gradients over all ranks before it applies them, and return it.

    The optimizer remains the same object, with its state and schedule. Its class becomes a subclass of its former class
    with the same name. So a saved model does not need dl_comm: it loads with the original optimizer class, or with the
    distributed one by `dl_comm.keras.load_model`. Wrap before `compile`: a training step that Keras has already traced
    does not average, until it is compiled again or trains with a `BroadcastCallback`.

    The first update broadcasts the trainable variables and the optimizer's state of rank 0. `BroadcastCallback`
    broadcasts the whole model, including variables that are not trainable, from any root.

    All ranks have equal weight: use batches of the same size. The ranks match variables by name, without the numbers
    that Keras gives to layers: in whatever order a rank has them. Variables without a gradient are skipped; a rank that
    skips others raises MismatchError. For mixed_float16 wrap the LossScaleOptimizer:
    `DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))`.

    On TensorFlow, XLA cannot compile the allreduce. Keras uses XLA by default only with a GPU. `BroadcastCallback`
    disables it; otherwise use `model.compile(..., jit_compile=False)`. On jax, XLA compiles the step, which calls the
    host for the allreduce; `fit` needs a `BroadcastCallback` there. Only on TensorFlow does the allreduce overlap with
    backward.

    Args:
        optimizer: A Keras optimizer, or a name such as "adam".
        team: The team to use; give optimizers that train at the same time (for example of a GAN) different teams.
        group: The ranks that average, instead of a team: those that hold the same part of a model, such as `grid.data`.
            Only they make the optimizer. A group has no schedule: not together with `nstep`. Rank 0 is that of the
            group then.
        nstep: The total number of steps. It sets the team's schedule
            `dl_comm.config_team(team, 0, int(warmup * nstep), nstep, verb, freq)`: after the warm-up a step applies the
            means of the previous step, and does not wait.
        nteam: The minimum number of teams.
        nthread_per_team: The plugin's name of `threads`.
        threads: Threads of each team that is created here (2).
        warmup: The fraction of steps that wait for their own means.
        verb: Who prints the time waited for communication: 0: no rank; 1: rank 0; 2: every rank.
        freq: Steps between these lines.
        broadcast: Start from the values of rank 0. With False, each rank keeps its own values, which must be equal.

    Raises:
        DTypeError: `optimizer` is not a Keras 3 optimizer.
        StateError: This version of Keras lacks a private name on which dl_comm depends.
        ArgumentError: `optimizer` is a DistributedOptimizer already, the team is negative, the name is unknown, or loss
            scaling is combined with a non-blocking schedule. Later: when a LossScaleOptimizer wraps this optimizer.
        StateError: In training: XLA compiles the function (TensorFlow), or no `BroadcastCallback` came first (jax).
        Exceptions of TensorFlow or jax: In training; see `dl_comm.error_of`.
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
        raise ArgumentError("wrap only the LossScaleOptimizer, not also its inner optimizer")
    if nstep is not None and warmup < 1 and hasattr(optimizer, "inner_optimizer"):
        raise ArgumentError(
            "a LossScaleOptimizer changes its scale, and would divide means of the previous step by the wrong scale: "
            "omit nstep, or use warmup=1.0"
        )
    check()
    team = start_averages(group, team, nteam, checked_threads(threads, nthread_per_team, 2), nstep, warmup, verb, freq)
    optimizer.__class__ = _averaging_class(type(optimizer), team < 0)  # type: ignore[arg-type]
    optimizer._dl_comm_team, optimizer._dl_comm_group = team, group
    optimizer._dl_comm_owner = new_owner(optimizer, team)
    optimizer._dl_comm_name = _next_name(team)
    optimizer._dl_comm_wrapped = True
    optimizer._dl_comm_starts = broadcast
    return optimizer


def shared_state(optimizer: Any) -> list[Any]:
    """The variables of an optimizer that are equal on all ranks: all except accumulated gradients."""
    both = (optimizer, getattr(optimizer, "inner_optimizer", None))
    own = {id(variable) for each in both for variable in getattr(each, "_accumulated_gradients", None) or ()}
    return [variable for variable in optimizer.variables if id(variable) not in own]


_made: Counter[int] = Counter()
state.on_end.append(_made.clear)


def _next_name(team: int) -> str:
    """A name for an optimizer's calls: the ranks make the optimizers of a team in the same order."""
    _made[team] += 1
    return "DistributedOptimizer" if _made[team] == 1 else f"DistributedOptimizer {_made[team]}"


def _refuse_late_start(grads: Sequence[Any]) -> None:
    if on.is_traced(grads):
        raise StateError(
            f"on {NAME} a step cannot broadcast the first values: add dl_comm.keras.BroadcastCallback() as the first "
            "of fit's callbacks, or give all ranks equal values and use DistributedOptimizer(..., broadcast=False)"
        )


@untraced
def _agreed_places(variables: Sequence[Any], group: Group | None) -> dict[str, int]:
    """The order of the variables on all ranks of a group, by what they compare of their names; empty: by position."""
    with on.outside_step():
        keys = [name.key for name in names_of(variables)]
        order = agreed_order(keys, "DistributedOptimizer", are_given=False, group=group)
        return {} if order is None else {keys[i]: place for place, i in enumerate(order)}


@untraced
def _start_from_rank_0(optimizer: Any, variables: Sequence[Any]) -> None:
    # Runs immediately, not as part of the traced step.
    with on.outside_step():
        if not optimizer.built:
            optimizer.build(variables)
        started = [*variables, *shared_state(optimizer)]
        on.broadcast(started, 0, "DistributedOptimizer start", optimizer._dl_comm_group)


def group_of(optimizer: Any) -> Group | None:
    """The group of a `DistributedOptimizer`, if it has one."""
    return optimizer._dl_comm_group if isinstance(optimizer, AveragingOptimizer) else None


def has_started(optimizer: Any) -> None:
    """Record that all ranks have the same values, so the first update need not broadcast."""
    if isinstance(optimizer, AveragingOptimizer):
        optimizer._dl_comm_starts = False


def retrace_train_step(model: Any) -> None:
    """Make Keras trace the training step again if the trace may be older than `DistributedOptimizer`."""
    optimizer = getattr(model, "optimizer", None)
    if isinstance(optimizer, AveragingOptimizer) and not optimizer._dl_comm_in_use:
        optimizer._dl_comm_in_use = True
        model.train_function = None


def load_model(filepath: Any, team: int = 0, *, group: Group | None = None, **kwargs: Any) -> Any:
    """Load a saved model with its optimizer state, and make the optimizer a `DistributedOptimizer`.

    `team` and `group` are those of `DistributedOptimizer`; a `SyncBatchNormalization` gets the group, too. Takes the
    keyword arguments of `keras.models.load_model`, and raises its errors. Every rank must be able to read the file;
    otherwise load it on rank 0, compile an equal model on other ranks, and use `BroadcastCallback`.
    """
    with layers_of(group):
        model = keras.models.load_model(filepath, **kwargs)
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, team=team, group=group)
        retrace_train_step(model)
    return model


@functools.cache
def _averaging_class(base: type[Any], is_of_group: bool) -> type[Any]:
    names: dict[str, Any] = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    names["_dl_comm_is_of_group"] = is_of_group
    return type(base.__name__, (AveragingOptimizer, base), names)
