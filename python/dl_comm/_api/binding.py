"""The binding of a tensor's framework."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from dl_comm._base.errors import ArgumentError, DTypeError

_Function = TypeVar("_Function", bound=Callable[..., Any])


def binding_of(tensors: Iterable[Any]) -> ModuleType | None:
    """The binding for these tensors, by type; None for arrays. Imports only frameworks that the caller uses."""
    return _binding_for(*set(map(type, tensors)))


@functools.lru_cache(256)  # types may be made at run time
def _binding_for(*types: type) -> ModuleType | None:
    names = {each.__module__.partition(".")[0] for each in types}
    if not names.isdisjoint(("tensorflow", "keras")):
        return binding_named("tensorflow")
    return binding_named("torch") if "torch" in names else None


def binding_named(name: str) -> ModuleType:
    """The binding of a framework, which is imported now."""
    if name == "torch":
        from dl_comm.torch import _binding as torch_binding

        return torch_binding
    from dl_comm.tensorflow import _binding as tensorflow_binding

    return tensorflow_binding


def of_every_framework(function: _Function) -> _Function:
    """Passes calls with tensors (the first argument, else ``out``) to the function of this name in their binding.

    TensorFlow's tensors are immutable and its calls have no handles: ``out`` and ``async_op`` raise ArgumentError, and
    functions that only write into ``out`` raise DTypeError.
    """
    name = function.__name__
    parameters = list(inspect.signature(function).parameters.values())
    first = parameters[0].name
    writes = any(each.name == "out" and each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given: Any = args[0] if args else kwargs.get(first)
        if given is None:
            given = kwargs.get("out")
        kind: Any = type(given)
        if kind is np.ndarray:
            return function(*args, **kwargs)
        binding = binding_of(given) if issubclass(kind, (list, tuple)) else _binding_for(kind)
        if binding is None:
            return function(*args, **kwargs)
        if (writes or kwargs) and binding.ARE_IMMUTABLE:
            if writes:
                raise DTypeError(f"{name} cannot write into TensorFlow tensors; use dl_comm.tensorflow.{name}")
            for option in ("out", "async_op"):
                value = kwargs.pop(option, None)
                if value is not None and value is not False:
                    raise ArgumentError(f"{name} of TensorFlow tensors returns new tensors; it takes no {option}")
        return getattr(binding, name)(*args, **kwargs)

    return call  # type: ignore[return-value]
