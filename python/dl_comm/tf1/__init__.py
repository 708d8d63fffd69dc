"""Runs unchanged TensorFlow 1 scripts on the installed TensorFlow: `python -m dl_comm.tf1 script.py args...`.

For the script, `import tensorflow as tf` returns the view of `dl_comm.tf1.install()`: the names of `tf.compat.v1`, and
equivalents of names that current TensorFlow has removed: `tf.layers`, a part of `tf.contrib`, the core of
`tf.estimator`, and `tensorflow.examples.tutorials.mnist.input_data`. `keras` and `tf.keras` are Keras 2, from the
package tf_keras. Graphs, sessions and reference variables behave as in TensorFlow 1. A name without an equivalent
raises an AttributeError (ImportError in an import statement) with the symbol, the line of the script, and an
alternative if there is one.

Packages for TensorFlow 2 (dl_comm, Keras 3, TensorFlow itself) see the real module at the same time: the view depends
on the calling package. Importing this package does not import TensorFlow; `install` does.

Thread rule: call `install` at the start of the program, before other threads use TensorFlow. The view is as thread-safe
as TensorFlow.
"""

from __future__ import annotations

import sys
from types import ModuleType

__all__ = ["install"]


def __dir__() -> list[str]:
    return sorted(__all__)


def install() -> ModuleType:
    """Switch TensorFlow to version 1 behaviour, and replace the module `tensorflow` by the TF1 view.

    A second call does nothing. A process cannot undo it.

    Returns:
        The view: the result of `import tensorflow as tf` from now on.

    Raises:
        ImportError: TensorFlow is not installed, or this version of TensorFlow or tf_keras is not supported.
        ValueError: TensorFlow has already run eager operations, so it cannot switch to graphs.
    """
    from dl_comm.tf1 import _names, _view

    present = sys.modules["tensorflow"]
    return present if isinstance(present, _view.View) else _names.install(present)
