"""Defines the names of the views, and installs them.

Thread rule: call `install` at the start of a program.
"""

from __future__ import annotations

import logging
import sys
import warnings
from types import ModuleType
from typing import Any

import numpy as np
import tensorflow

from dl_comm.tf1 import _contrib, _estimator, _keras, _mnist
from dl_comm.tf1._view import MissingFinder, View

_v1 = tensorflow.compat.v1


def install(real: ModuleType) -> ModuleType:
    """Disable TensorFlow 2 behaviour, and replace `real`, the module `tensorflow`, in `sys.modules` by views.

    Returns the view of `tensorflow`.
    """
    _silence_advice()
    _disable_v2_behavior()
    _take_floats_as_dimensions()
    modules = _keras.views()
    keras = modules["keras"]
    modules |= {view.__name__: view for view in (*_small_views(real), *_contrib_views(keras))}
    own: dict[str, Any] = {
        "contrib": modules["tensorflow.contrib"],
        "estimator": modules["tensorflow.estimator"],
        "keras": keras,
        "layers": modules["tensorflow.layers"],
        "nn": modules["tensorflow.nn"],
    }
    view = View("tensorflow", own, _v1, real)
    view.__dict__.update({name: getattr(real, name) for name in ("__file__", "__loader__", "__package__", "__spec__")})
    as_v1 = View("tensorflow.compat.v1", own, _v1, _v1)
    own["compat"] = View("tensorflow.compat", {"v1": as_v1, "v2": real}, _v1.compat, tensorflow.compat)
    for each in (view, as_v1):
        each.__dict__["_own"].update(own)
    modules |= {each.__name__: each for each in (view, as_v1, own["compat"])}
    sys.modules.update(modules)
    sys.meta_path.append(MissingFinder())
    return view


def _silence_advice() -> None:
    """Hide deprecation warnings of TensorFlow and tf_keras; show all others."""
    advice = ("is deprecated", "will be removed in a future version", "file format is considered legacy")

    def shown(record: logging.LogRecord) -> bool:
        return not any(each in str(record.msg) for each in advice)

    _v1.get_logger().addFilter(shown)
    for each in advice:
        warnings.filterwarnings("ignore", f"(?s).*{each}", UserWarning)


def _disable_v2_behavior() -> None:
    logger = _v1.get_logger()
    level = logger.level
    logger.setLevel("ERROR")  # hides the warning about this call
    try:
        _v1.disable_v2_behavior()
    finally:
        logger.setLevel(level)


def _take_floats_as_dimensions() -> None:
    """Accept integral floats as dimensions, as TensorFlow 1 did: `[None, 28 / 2]` in Python 3.

    Raises ImportError when TensorFlow does not use `tf.Dimension` for shapes.
    """
    original = _v1.Dimension.__init__

    def __init__(self: Any, value: Any) -> None:
        whole = isinstance(value, (float, np.floating)) and float(value).is_integer()
        original(self, int(value) if whole else value)

    _v1.Dimension.__init__ = __init__
    try:
        _v1.TensorShape([2.0])
    except TypeError as error:
        raise ImportError(f"TensorFlow {tensorflow.__version__} has no tf.Dimension that takes floats") from error


def _small_views(real: ModuleType) -> list[View]:
    """Create the submodules of `tensorflow` that scripts import from."""
    views = [
        # For `from tensorflow.train import ...`: otherwise the import system finds TensorFlow 2's modules.
        View(f"tensorflow.{name}", {}, module, getattr(real, name, None))
        for name, module in vars(_v1).items()
        if isinstance(module, ModuleType)
        and not name.startswith("_")
        and name not in ("compat", "keras", "layers", "nn")
        and f"tensorflow.{name}" not in sys.modules
    ]
    cells = View("tensorflow.nn.rnn_cell", {}, _keras.legacy("rnn_cell"))
    inputs = View("tensorflow.estimator.inputs", _estimator.INPUTS, gone=_estimator.INPUTS_GONE)
    mnist = View("tensorflow.examples.tutorials.mnist", {"input_data": _mnist})
    tutorials = View("tensorflow.examples.tutorials", {"mnist": mnist})
    return [
        *views,
        View("tensorflow.nn", {"rnn_cell": cells}, _v1.nn, real.nn),
        cells,
        View("tensorflow.layers", {}, _keras.legacy("layers")),
        View("tensorflow.estimator", {**_estimator.NAMES, "inputs": inputs}, gone=_estimator.GONE),
        inputs,
        View("tensorflow.examples", {"tutorials": tutorials}),
        tutorials,
        mnist,
    ]


def _contrib_views(keras: View) -> list[View]:
    moved = vars(_v1.data.experimental)
    data = {name: moved[name] for name in _contrib.FROM_DATA if name in moved}
    loops = {name: getattr(_v1.nn, name) for name in _contrib.FROM_NN}
    parts = {
        "data": View("tensorflow.contrib.data", {**_contrib.DATA, **data}),
        "distributions": View("tensorflow.contrib.distributions", {}, _v1.distributions),
        "framework": View("tensorflow.contrib.framework", _contrib.FRAMEWORK),
        "layers": View("tensorflow.contrib.layers", _contrib.LAYERS, gone=_contrib.LAYERS_GONE),
        "rnn": View("tensorflow.contrib.rnn", loops, _keras.legacy("rnn_cell")),
    }
    contrib = View("tensorflow.contrib", {**parts, "keras": keras}, gone=_contrib.GONE)
    return [contrib, *parts.values()]
