"""What several backends of Keras have in common; see `_backend`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dl_comm._base.errors import StateError


def is_traced(values: Sequence[Any]) -> bool:
    """False: the variables have values, to which `outside_step` can assign."""
    del values
    return False


def build_first(
    model: Any, train_function: Callable[[Any], Any], broadcast: Callable[[], None]
) -> Callable[[Any], Any]:
    """Raises StateError: Keras builds a model before training on this backend, unless it cannot."""
    raise StateError(f"the model {model.name!r} has no variables yet: call it on one batch before fit")
