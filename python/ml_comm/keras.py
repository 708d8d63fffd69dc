"""``dl_comm.keras`` under the plugin's first name."""

from dl_comm.keras import *  # noqa: F403 - the same names
from dl_comm.keras import __all__ as __all__


def __dir__() -> list[str]:
    return sorted(__all__)
