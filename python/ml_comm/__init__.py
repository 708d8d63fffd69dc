"""ml_comm: ``dl_comm`` under its first name, for scripts that were written for the Cray PE ML Plugin.

Everything is ``dl_comm``'s, one and the same process-wide state. One thing differs: a negative ``ksteps`` of
``config_team`` counts the blocking calls at the end, as that plugin was measured to do (``cooldown="last"``), unless
``DL_COMM_COOLDOWN`` or the argument ``cooldown`` says otherwise.
"""

from __future__ import annotations

import os
from typing import Any

import dl_comm
from dl_comm import *  # noqa: F403 - the same names
from dl_comm import __version__ as __version__

__all__ = list(dl_comm.__all__)  # noqa: PLE0605


def config_team(*args: Any, cooldown: str | None = None, **kwargs: Any) -> None:  # type: ignore[no-redef]
    """As ``dl_comm.config_team``, where ``cooldown`` is "last" when neither it nor ``DL_COMM_COOLDOWN`` is given."""
    if cooldown is None and not os.environ.get("DL_COMM_COOLDOWN"):
        cooldown = "last"
    dl_comm.config_team(*args, cooldown=cooldown, **kwargs)
