"""Log lines of dl_comm: by ``logging`` where the program uses it, else on standard error.

Needs neither the core nor a start. Thread rule: any thread.
"""

from __future__ import annotations

import sys

from dl_comm import _rc

NAME = "dl_comm"
"""The name of the logger."""


def is_routed() -> bool:
    """Whether lines go through ``logging``: the program has set a handler, for this logger or for all."""
    logging = sys.modules.get("logging")  # nobody has set a handler before an import
    return _rc.rc.logging and logging is not None and logging.getLogger(NAME).hasHandlers()


def warn(text: str) -> None:
    """Logs a line of level WARNING: what a user should know."""
    if is_routed():
        sys.modules["logging"].getLogger(NAME).warning("%s", text)
    else:
        print(f"dl_comm: {text}", file=sys.stderr, flush=True)
