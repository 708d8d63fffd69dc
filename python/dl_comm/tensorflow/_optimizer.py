"""`DistributedOptimizer`: an optimizer that averages gradients over the ranks before it applies them.

Thread rule: as TensorFlow's for optimizers.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import dl_comm
from dl_comm.tensorflow import _ops


def DistributedOptimizer(optimizer: Any, team: int = 0) -> Any:  # noqa: N802 (a class to those who call it)
    """Wrap an optimizer so that it averages gradients over all ranks before it applies them.

    Args:
        optimizer: A `tf.compat.v1.train.Optimizer`, whose `compute_gradients` and `minimize` then average, or a Keras
            optimizer, for which this is `dl_comm.keras.DistributedOptimizer`: changed in place.
        team: The thread team that averages.

    Returns:
        An optimizer of the same kind. Variables without a gradient are skipped; all ranks must skip the same.

    Raises:
        TypeError: It is neither kind of optimizer.
        ValueError: It is wrapped already, or the team is negative.
    """
    if isinstance(optimizer, _DistributedV1Optimizer):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        from dl_comm import keras

        return keras.DistributedOptimizer(optimizer, team)
    team = _ops.checked_team(team)
    if not dl_comm.is_initialized():
        dl_comm.init()
    return _DistributedV1Optimizer(optimizer, team)


class _DistributedV1Optimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """A TF1 optimizer that leaves everything to another one, but averages what `compute_gradients` gives."""

    def __init__(self, optimizer: Any, team: int) -> None:
        super().__init__(use_locking=False, name=f"Distributed{type(optimizer).__name__}")
        self._optimizer = optimizer
        self._team = team

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Compute the gradients as the wrapped optimizer does, and average those that are not None."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        variables = [variable for _, variable in pairs]
        means = _ops.average_present([grad for grad, _ in pairs], variables, self._team)
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
