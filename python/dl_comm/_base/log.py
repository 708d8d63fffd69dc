"""Log lines of dl_comm: by ``logging`` where the program uses it, else on standard error.

Needs neither the core nor a start. Thread rule: any thread.
"""

from __future__ import annotations

import sys
from typing import Any

from dl_comm._base import rc

NAME = "dl_comm"
"""The name of the logger."""


def _handlers() -> list[Any]:
    """The handlers that get the lines."""
    found: list[Any] = []
    if "logging" not in sys.modules or not rc.rc.logging:
        return found  # nobody has set a handler before an import
    import logging  # waits for a thread that imports it now

    logger: logging.Logger | None = logging.getLogger(NAME)
    while logger is not None:
        found += logger.handlers
        logger = logger.parent if logger.propagate else None
    return found


def is_routed() -> bool:
    """Whether lines go through ``logging``: the program has set a handler, for this logger or for all.

    Those by which pytest captures records are no output: with only these, lines are on standard error, too.
    """
    return any(not type(handler).__module__.startswith("_pytest.") for handler in _handlers())


def warn(text: str) -> None:
    """Logs a line of level WARNING: what a user should know."""
    if _handlers():
        sys.modules["logging"].getLogger(NAME).warning("%s", text)
    if not is_routed():
        print(f"dl_comm: {text}", file=sys.stderr, flush=True)
