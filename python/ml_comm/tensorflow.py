"""``dl_comm.tensorflow`` under the plugin's first name."""

from dl_comm.tensorflow import *  # noqa: F403 - the same names
from dl_comm.tensorflow import __all__ as __all__
from ml_comm import config_team as config_team


def __dir__() -> list[str]:
    return sorted(__all__)
