"""TensorFlow 1 scripts, unchanged, on the TensorFlow that is installed: `python -m dl_comm.tf1 script.py args...`.

The script says `import tensorflow as tf` and gets the view of `dl_comm.tf1.install()`: the names of `tf.compat.v1`, and
what current TensorFlow has no more, as far as it exists here: `tf.layers`, a part of `tf.contrib`, the core of
`tf.estimator`, and `tensorflow.examples.tutorials.mnist.input_data`. `keras` and `tf.keras` are Keras 2, from the
package tf_keras. Graphs, sessions and reference variables behave as in TensorFlow 1. What has no equivalent raises an
AttributeError (ImportError in an import statement) that names the symbol, the line that asked for it, and what to use
instead where there is something.

Packages that are written for TensorFlow 2 (dl_comm, Keras 3, TensorFlow itself) see the real module at the same time:
the view answers by who asks. Importing this package imports no TensorFlow; `install` does.

Thread rule: `install` belongs to the start of the program, before other threads use TensorFlow. The view may be used
from any thread, as TensorFlow may.
"""

from __future__ import annotations

import sys
from types import ModuleType

__all__ = ["install"]


def install() -> ModuleType:
    """Switch TensorFlow to its version 1 behaviour, and put the TF1 view in the place of the module `tensorflow`.

    Calling it again changes nothing. There is no way back in a process.

    Returns:
        The view: what `import tensorflow as tf` gives from now on.

    Raises:
        ImportError: TensorFlow is not installed, or it or tf_keras lacks something that this depends on.
        ValueError: TensorFlow has run something eagerly already, and so cannot switch to graphs.
    """
    from dl_comm.tf1 import _names, _view

    present = sys.modules["tensorflow"]
    return present if isinstance(present, _view.View) else _names.install(present)
