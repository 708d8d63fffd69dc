"""`DistributedOptimizer`: an optimizer that averages gradients over the ranks before it applies them.

Thread rule: as TensorFlow's for optimizers.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from dl_comm._arrays.groups import Group
from dl_comm._arrays.teams import new_owner, start_averages
from dl_comm._base.checks import checked_threads
from dl_comm._base.errors import ArgumentError
from dl_comm.tensorflow import _ops


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
    """Wrap an optimizer so that it averages gradients over all ranks before it applies them.

    Args:
        optimizer: A `tf.compat.v1.train.Optimizer`, whose `compute_gradients` and `minimize` then average; or a Keras
            optimizer, which `dl_comm.keras.DistributedOptimizer` changes in place.
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
        broadcast: Keras optimizers start from the values of rank 0; with False, each rank keeps its own. With a TF1
            optimizer, use `BroadcastHook` or `broadcast_variables` instead.

    Returns:
        An optimizer of the same kind. The ranks match variables by name, in whatever order they have them. It skips
        variables without a gradient; a rank that skips others raises MismatchError.

    Raises:
        DTypeError: `optimizer` is neither kind of optimizer.
        ArgumentError: `optimizer` is a DistributedOptimizer already, or the team is negative.
    """
    if isinstance(optimizer, _DistributedV1Optimizer):
        raise ArgumentError("the optimizer is a DistributedOptimizer already")
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        from dl_comm.keras._optimizer import DistributedOptimizer as KerasOptimizer

        return KerasOptimizer(
            optimizer,
            team=team,
            group=group,
            nstep=nstep,
            nteam=nteam,
            nthread_per_team=nthread_per_team,
            threads=threads,
            warmup=warmup,
            verb=verb,
            freq=freq,
            broadcast=broadcast,
        )
    team = start_averages(group, team, nteam, checked_threads(threads, nthread_per_team, 2), nstep, warmup, verb, freq)
    return _DistributedV1Optimizer(optimizer, team, group)


class _DistributedV1Optimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """A TF1 optimizer that delegates to another one, but averages the gradients of `compute_gradients`."""

    def __init__(self, optimizer: Any, team: int, group: Group | None) -> None:
        super().__init__(use_locking=False, name=f"Distributed{type(optimizer).__name__}")
        self._optimizer = optimizer
        self._team, self._group = team, group  # keeps the group
        self._owner = new_owner(self, team)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Compute the gradients with the wrapped optimizer, and average those that are not None."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        variables = [variable for _, variable in pairs]
        means = _ops.average_non_none([grad for grad, _ in pairs], variables, self._team, self._owner)
        return list(zip(means, variables, strict=True))

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Apply gradients, which are means already, with the wrapped optimizer."""
        return self._optimizer.apply_gradients(*args, **kwargs)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """Return a slot variable of the wrapped optimizer."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """Return the names of the slots of the wrapped optimizer."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """Return the variables of the wrapped optimizer."""
        return self._optimizer.variables(*args, **kwargs)
