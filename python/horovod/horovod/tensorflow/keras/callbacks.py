"""The callbacks of `horovod.keras`, under the name that scripts of ``tf.keras`` import."""

from horovod.keras import callbacks as _callbacks
from horovod.keras.callbacks import *  # noqa: F403 (its __all__)

__all__ = [*_callbacks.__all__]
