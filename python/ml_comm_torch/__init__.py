"""``ml_comm.torch`` under the name of the helper module that torch scripts of the Cray PE ML Plugin import."""

from ml_comm.torch import *  # noqa: F403 - the same names
from ml_comm.torch import __all__ as __all__
