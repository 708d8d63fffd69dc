"""Elastic training: not yet. The names exist, so that scripts can import them; their use raises NotImplementedError."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

_TEXT = "dl_comm's horovod has no elastic training yet: use hvd.init() and a fixed number of ranks"


def not_yet(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises NotImplementedError."""
    raise NotImplementedError(_TEXT)


class NotYet:
    """What elastic training has: raises NotImplementedError when it is made. Scripts may derive from it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        not_yet()


State = ObjectState = NotYet
run_fn = not_yet


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """The decorator of an elastic training function. The function raises NotImplementedError when it is called."""
    return not_yet
