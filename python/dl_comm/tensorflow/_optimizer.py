"""`DistributedOptimizer`: an optimizer that averages gradients over the ranks before it applies them.

Thread rule: as TensorFlow's for optimizers.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from dl_comm._errors import ArgumentError
from dl_comm._process import checked_team, new_owner, start_team
from dl_comm.tensorflow import _ops


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
    """Wrap an optimizer so that it averages gradients over all ranks before it applies them.

    Args:
        optimizer: A `tf.compat.v1.train.Optimizer`, whose `compute_gradients` and `minimize` then average, or a Keras
            optimizer, for which this is `dl_comm.keras.DistributedOptimizer`: changed in place.
        team: The thread team that averages; two optimizers that train at once (of a GAN, say) want one each.
        nstep: The number of steps in all; with it the team gets the schedule
            `dl_comm.config_team(team, 0, int(warmup * nstep), nstep, verb, freq)`: after the warm-up a step applies the
            averages that the step before has started, and waits for nothing.
        nteam: Teams to have at least.
        nthread_per_team: Threads of the teams that are made here.
        warmup: The share of the steps that wait for their own averages.
        verb: 1: rank 0 prints how long it has waited for communication, 2: every rank does, 0: none.
        freq: After how many steps each.
        broadcast: Keras optimizers start from the values of rank 0; False leaves each rank its own. With a TF1
            optimizer `BroadcastHook` or `broadcast_variables` does that.

    Returns:
        An optimizer of the same kind. Variables without a gradient are skipped; all ranks must skip the same.

    Raises:
        DTypeError: It is neither kind of optimizer.
        ArgumentError: It is wrapped already, or the team is negative.
    """
    if isinstance(optimizer, _DistributedV1Optimizer):
        raise ArgumentError("the optimizer is a DistributedOptimizer already")
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        from dl_comm import keras

        return keras.DistributedOptimizer(
            optimizer,
            team,
            nstep=nstep,
            nteam=nteam,
            nthread_per_team=nthread_per_team,
            warmup=warmup,
            verb=verb,
            freq=freq,
            broadcast=broadcast,
        )
    team = checked_team(team)
    start_team(team, nteam, nthread_per_team, nstep, warmup, verb, freq)
    return _DistributedV1Optimizer(optimizer, team)


class _DistributedV1Optimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """A TF1 optimizer that leaves everything to another one, but averages what `compute_gradients` gives."""

    def __init__(self, optimizer: Any, team: int) -> None:
        super().__init__(use_locking=False, name=f"Distributed{type(optimizer).__name__}")
        self._optimizer = optimizer
        self._team = team
        self._owner = new_owner(self, team)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Compute the gradients as the wrapped optimizer does, and average those that are not None."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        variables = [variable for _, variable in pairs]
        means = _ops.average_non_none([grad for grad, _ in pairs], variables, self._team, self._owner)
        return list(zip(means, variables, strict=True))

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Apply gradients, which are averages already, as the wrapped optimizer does."""
        return self._optimizer.apply_gradients(*args, **kwargs)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """Give a slot variable of the wrapped optimizer."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """Give the names of the slots of the wrapped optimizer."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """Give the variables of the wrapped optimizer."""
        return self._optimizer.variables(*args, **kwargs)
