"""``dl_comm.keras`` under the plugin's first name."""

from dl_comm.keras import *  # noqa: F403 - the same names
from dl_comm.keras import __all__ as __all__
