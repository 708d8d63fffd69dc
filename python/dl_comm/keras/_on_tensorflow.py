"""Keras on TensorFlow, see `_backend`: the ops of `dl_comm.tensorflow`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from dl_comm._arrays.groups import Group
from dl_comm.keras import _common
from dl_comm.tensorflow import _ops
from dl_comm.tensorflow._collectives import allreduce
from dl_comm.tensorflow._training import learning_rate as rate
from dl_comm.tensorflow._variables import broadcast_variables

__all__ = ["average", "broadcast", "build_first", "compiles", "is_traced", "outside_step", "rate", "sums", "untraced"]

compiles = False
untraced = _ops.no_autograph
is_traced = _common.is_traced


def outside_step() -> AbstractContextManager[None]:
    """Leaves the graph of a `tf.function`."""
    context: AbstractContextManager[None] = tf.init_scope()
    return context


def average(
    grads: Sequence[Any], variables: Sequence[Any], team: int, owner: int, places: Mapping[str, int], name: str
) -> list[Any]:
    """The means of the gradients; the owner tells optimizers of the same name apart."""
    del name
    return _ops.average_non_none(grads, variables, team, owner, places=places)


def broadcast(variables: Sequence[Any], root: int, name: str, group: Group | None) -> None:
    """Assigns the values of a rank."""
    broadcast_variables(variables, root, name=name, group=group)


def sums(tensors: Sequence[Any], group: Group | None, name: str) -> list[Any]:
    """Differentiable sums over the ranks."""
    return list(allreduce(list(tensors), group=group, name=name))


def build_first(
    model: Any, train_function: Callable[[Any], Any], broadcast: Callable[[], None]
) -> Callable[[Any], Any]:
    """A first step that builds the model from the shapes of the data, without a batch, before the broadcast.

    Otherwise the first step creates the variables, and would update them before the broadcast.
    """

    def first_step(iterator: Any) -> Any:
        model.train_function = train_function
        x, _, _ = keras.utils.unpack_x_y_sample_weight(iterator.element_spec)
        # As in Keras's train_step.
        training = {"training": True} if getattr(model, "_call_has_training_arg", False) else {}
        tf.function(lambda inputs: model(inputs, **training), autograph=False).get_concrete_function(x)
        broadcast()
        return train_function(iterator)

    return first_step
