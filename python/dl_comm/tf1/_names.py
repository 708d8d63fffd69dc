"""Which names the view has, and putting it in place.

Thread rule: `install` belongs to the start of a program.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import tensorflow

from dl_comm.tf1 import _contrib, _estimator, _layers, _mnist
from dl_comm.tf1._view import MissingFinder, View

_v1 = tensorflow.compat.v1


def install(real: ModuleType) -> ModuleType:
    """Switch off the behaviour of TensorFlow 2, and put views for `real`, the module `tensorflow`, into `sys.modules`.

    Returns the view of `tensorflow` itself.
    """
    _disable_v2_behavior()
    modules = {view.__name__: view for view in (*_small_views(real), *_contrib_views())}
    own: dict[str, Any] = {
        "contrib": modules["tensorflow.contrib"],
        "estimator": modules["tensorflow.estimator"],
        "keras": tensorflow.keras,
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


def _disable_v2_behavior() -> None:
    logger = _v1.get_logger()
    level = logger.level
    logger.setLevel("ERROR")  # it warns of what is meant here
    try:
        _v1.disable_v2_behavior()
    finally:
        logger.setLevel(level)


def _small_views(real: ModuleType) -> list[View]:
    """Make the modules beside `tf` that scripts import from."""
    views = [
        # For `from tensorflow.train import ...`: the import system would find the modules of TensorFlow 2.
        View(f"tensorflow.{name}", {}, module, getattr(real, name, None))
        for name, module in vars(_v1).items()
        if isinstance(module, ModuleType)
        and not name.startswith("_")
        and name not in ("compat", "keras", "layers", "nn")
        and f"tensorflow.{name}" not in sys.modules
    ]
    cells = {"rnn_cell": "keras.layers.LSTMCell, GRUCell and SimpleRNNCell in keras.layers.RNN"}
    inputs = View("tensorflow.estimator.inputs", _estimator.INPUTS, gone=_estimator.INPUTS_GONE)
    mnist = View("tensorflow.examples.tutorials.mnist", {"input_data": _mnist})
    tutorials = View("tensorflow.examples.tutorials", {"mnist": mnist})
    return [
        *views,
        View("tensorflow.nn", {}, _v1.nn, real.nn, cells),
        View("tensorflow.layers", {name: getattr(_layers, name) for name in _layers.__all__}, gone=_layers.GONE),
        View("tensorflow.estimator", {**_estimator.NAMES, "inputs": inputs}, gone=_estimator.GONE),
        inputs,
        View("tensorflow.examples", {"tutorials": tutorials}),
        tutorials,
        mnist,
    ]


def _contrib_views() -> list[View]:
    moved = vars(_v1.data.experimental)
    data = {name: moved[name] for name in _contrib.FROM_DATA if name in moved}
    parts = {
        "data": View("tensorflow.contrib.data", {**_contrib.DATA, **data}),
        "distributions": View("tensorflow.contrib.distributions", {}, _v1.distributions),
        "framework": View("tensorflow.contrib.framework", _contrib.FRAMEWORK),
        "keras": View("tensorflow.contrib.keras", {}, tensorflow.keras),
        "layers": View("tensorflow.contrib.layers", _contrib.LAYERS, gone=_contrib.LAYERS_GONE),
    }
    contrib = View("tensorflow.contrib", parts, gone=_contrib.GONE)
    return [contrib, *parts.values()]
