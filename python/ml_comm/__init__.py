"""ml_comm: ``dl_comm`` under its first name, for scripts of the Cray PE ML Plugin.

It shares the process-wide state of ``dl_comm``. One default differs: a negative ``ksteps`` of ``config_team`` counts
the blocking calls at the end, as measured with that plugin (``cooldown="last"``), unless ``DL_COMM_COOLDOWN`` or the
argument ``cooldown`` is set.
"""

from __future__ import annotations

import os
from typing import Any

import dl_comm
from dl_comm import *  # noqa: F403 - the same names
from dl_comm import __version__ as __version__
from dl_comm import core_id as core_id
from dl_comm.compat import cray, torchmpi
from dl_comm.compat.cray import *  # noqa: F403
from dl_comm.compat.torchmpi import *  # noqa: F403

__all__ = sorted(({*dl_comm.__all__} | {*cray.__all__, *torchmpi.__all__}) - {"core_id"})  # noqa: PLE0605


def __dir__() -> list[str]:
    return __all__


def config_team(*args: Any, cooldown: str | None = None, **kwargs: Any) -> None:  # type: ignore[no-redef]
    """As ``dl_comm.config_team``, with "last" as the default of ``cooldown`` if ``DL_COMM_COOLDOWN`` is not set."""
    if cooldown is None and not os.environ.get("DL_COMM_COOLDOWN"):
        cooldown = "last"
    dl_comm.config_team(*args, cooldown=cooldown, **kwargs)
