"""What differs between the backends of Keras: `on` is the module for this process's backend.

Each `_on_...` module has:

- `compiles`: whether a training step that XLA compiles can contain the calls.
- `untraced`: a decorator for functions that make calls while a step is traced.
- `outside_step()`: a context in which calls run now, not as part of a step that is being traced.
- `is_traced(values)`: whether the values belong to such a step, so that the variables have none that count.
- `average(grads, variables, team, owner, places, name)`: the means of the gradients; None entries stay.
- `broadcast(variables, root, name, group)`: assigns the values of a rank.
- `build_first(model, train_function, broadcast)`: a first step for a model that has no variables yet.
- `sums(tensors, group, name)`: differentiable sums over the ranks.
- `rate(schedule, step, dtype)`: a learning rate.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import keras

from dl_comm._arrays.tensor_names import Name, by_structure
from dl_comm._base import private_names

_Function = TypeVar("_Function", bound=Callable[..., Any])
BACKENDS = ("tensorflow", "torch", "jax")
NAME: str = keras.backend.backend()

if not keras.__version__.startswith("3.") or NAME not in BACKENDS:
    raise ImportError(
        f"dl_comm.keras needs Keras 3 on TensorFlow, torch or jax, but this is Keras {keras.__version__} on {NAME}: "
        "set KERAS_BACKEND=tensorflow, torch or jax before the first import of keras"
    )

_module = f"_on_{NAME}"
on: Any = importlib.import_module(f"{__package__}.{_module}")
untraced: Callable[[_Function], _Function] = on.untraced


def check() -> None:
    """Raise StateError if Keras lacks a private name on which dl_comm depends with this backend."""
    private_names.check("keras")
    private_names.check(f"keras on {NAME}")


def names_of(variables: Sequence[Any]) -> list[Name]:
    """The paths of variables; the ranks compare them without the numbers that Keras gives to layers."""
    # Those of TensorFlow have a name only.
    paths = [getattr(variable, "path", variable.name) for variable in variables]
    return [Name(path, key) for path, key in zip(paths, by_structure(paths), strict=True)]


def in_order(names: Sequence[Name], places: Mapping[str, int]) -> list[int]:
    """The order of variables on all ranks, as indices. `places`: by the keys of their names; empty: by position."""
    if not places:
        return list(range(len(names)))
    return sorted(range(len(names)), key=lambda i: (places.get(names[i].key, len(places)), names[i].key))
