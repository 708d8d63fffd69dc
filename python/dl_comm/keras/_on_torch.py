"""Keras on torch, see `_backend`: the ops of `dl_comm.torch`.

Keras calls `apply` after backward, so an allreduce is not hidden behind backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import torch

from dl_comm._arrays.groups import Group
from dl_comm._arrays.tensor_names import labels, with_keys
from dl_comm.keras import _backend, _common
from dl_comm.torch import _ops
from dl_comm.torch._collectives import allreduce
from dl_comm.torch._functions import broadcast_in_order
from dl_comm.training import Schedule

compiles = False
is_traced = _common.is_traced
build_first = _common.build_first
untraced = torch.compiler.disable


def outside_step() -> AbstractContextManager[None]:
    """Calls run at once on torch."""
    return contextlib.nullcontext()


def average(
    grads: Sequence[Any], variables: Sequence[Any], team: int, owner: int, places: Mapping[str, int], name: str
) -> list[Any]:
    """The means of the gradients, in one call; the name tells optimizers apart."""
    del owner
    results, names = list(grads), _backend.names_of(variables)
    order = [i for i in _backend.in_order(names, places) if results[i] is not None]
    if order:
        given = [keras.ops.convert_to_tensor(results[i]).detach().contiguous() for i in order]
        compared = labels(names[i] if places else str(names[i]) for i in order)
        with torch.no_grad():
            means = _ops.average_new(given, team, name, compared)
        for i, mean in zip(order, means, strict=True):
            results[i] = mean
    return results


def broadcast(variables: Sequence[Any], root: int, name: str, group: Group | None) -> None:
    """Assigns the values of a rank, in place."""
    del name
    names = _backend.names_of(variables)
    named = [(str(path), variable.value.detach()) for path, variable in zip(names, variables, strict=True)]
    broadcast_in_order(with_keys(named, [path.key for path in names]), root, group)


def sums(tensors: Sequence[Any], group: Group | None, name: str) -> list[Any]:
    """Differentiable sums over the ranks."""
    if any(tensor.is_meta for tensor in tensors):
        return list(tensors)  # Keras computes shapes, on one rank
    return list(allreduce(list(tensors), group=group, name=name))


def rate(schedule: Schedule, step: Any, dtype: Any) -> Any:
    """The learning rate of a step, computed in float64."""
    return keras.ops.cast(schedule.rate(keras.ops.cast(step, "float64"), keras.ops), dtype)
