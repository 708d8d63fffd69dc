"""Elastic training: not yet. The names exist, so that scripts can import them; their use raises NotImplementedError."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

_TEXT = "dl_comm's horovod has no elastic training yet: use hvd.init() and a fixed number of ranks"


def not_yet(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises NotImplementedError."""
    raise NotImplementedError(_TEXT)


class _NotYet:
    """Raises NotImplementedError when it is made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        not_yet()


class State(_NotYet):
    """The state of a training. Not yet."""


class ObjectState(State):
    """State of picklable objects. Not yet."""


def run_fn(func: Callable[..., Any], reset: Callable[..., Any]) -> NoReturn:
    """Not yet."""
    not_yet()


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """The decorator of an elastic training function. The function raises NotImplementedError when it is called."""
    return not_yet
