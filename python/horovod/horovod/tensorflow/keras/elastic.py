"""As `horovod.keras.elastic`."""

from horovod.keras import elastic as _elastic
from horovod.keras.elastic import *  # noqa: F403 (its __all__)

__all__ = [*_elastic.__all__]
