"""Keras on jax, see `_backend`: a step that XLA compiles calls back to the host, where NumPy arrays are averaged.

One ordered call for all gradients of a step; with `gradient_accumulation_steps`, also in steps that only accumulate. An
allreduce is not hidden behind backward. An exception in a call ends the step; jax raises its own exception with the
text, see `dl_comm.error_of`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import keras
import numpy as np
from jax.experimental import io_callback

from dl_comm import _dl_comm
from dl_comm._arrays.collectives import broadcast_in
from dl_comm._arrays.groups import Group
from dl_comm._arrays.tensor_names import agreed_order
from dl_comm._base.errors import CommError, StateError, as_text
from dl_comm.keras import _backend, _common
from dl_comm.training import Schedule

compiles = True
build_first = _common.build_first


def untraced(function: Any) -> Any:
    """Python code runs as it is while jax traces."""
    return function


def outside_step() -> AbstractContextManager[None]:
    """Calls that are not of jax run at once."""
    return contextlib.nullcontext()


def is_traced(values: Sequence[Any]) -> bool:
    """Whether jax traces a step: then it has taken the values of all variables before."""
    return any(isinstance(value, jax.core.Tracer) for value in values)


def average(
    grads: Sequence[Any], variables: Sequence[Any], team: int, owner: int, places: Mapping[str, int], name: str
) -> list[Any]:
    """The means of the gradients, in one call; the name tells optimizers apart."""
    del owner
    if keras.distribution.distribution() is not None:
        raise StateError("dl_comm.keras on jax averages over processes: remove keras.distribution.set_distribution()")
    results = list(grads)
    order = [i for i in _backend.in_order(_backend.names_of(variables), places) if results[i] is not None]
    if order:

        def on_host(*arrays: Any) -> list[Any]:
            given = [np.ascontiguousarray(array).reshape(np.shape(array)) for array in arrays]
            means = [np.empty_like(array) for array in given]
            try:
                _dl_comm.average(given, means, team, name)
            except CommError as error:
                raise RuntimeError(as_text(error)) from None
            return means

        given = [jax.numpy.asarray(results[i]) for i in order]
        shapes = [jax.ShapeDtypeStruct(grad.shape, grad.dtype) for grad in given]
        for i, mean in zip(order, io_callback(on_host, shapes, *given, ordered=True), strict=True):
            results[i] = mean
    return results


def broadcast(variables: Sequence[Any], root: int, name: str, group: Group | None) -> None:
    """Assigns the values of a rank."""
    keys = [path.key for path in _backend.names_of(variables)]
    order = agreed_order(keys, name, are_given=True, group=group) or []
    values = [np.array(variables[i].value) for i in order]
    broadcast_in(values, root, group, name)
    for i, value in zip(order, values, strict=True):
        # A step donates the memory of the variables, which therefore must not be that of a NumPy array.
        variables[i].assign(jax.numpy.array(value, copy=True))


def sums(tensors: Sequence[Any], group: Group | None, name: str) -> list[Any]:
    """Raises StateError: jax does not differentiate a call to the host."""
    raise StateError(
        f"{name} has no gradient on jax: use KERAS_BACKEND=tensorflow or torch, or a layer that needs no other rank, "
        "such as keras.layers.GroupNormalization"
    )


def rate(schedule: Schedule, step: Any, dtype: Any) -> Any:
    """The learning rate of a step, computed in jax's widest float type."""
    return keras.ops.cast(schedule.rate(jax.numpy.asarray(step, float), jax.numpy), dtype)
