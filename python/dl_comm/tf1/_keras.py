"""Keras and layers of the TensorFlow 1 era, from the package tf_keras: `keras`, `tf.keras` and `tf.layers` for scripts.

Optimizers have a `get_gradients` that a script may override, variables are reference variables, and renamed modules of
Keras have their old names. Packages for TensorFlow 2 see Keras 3.

Thread rule: call `views` at the start of a program.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import operator
import sys
from types import ModuleType
from typing import Any

import tensorflow

from dl_comm.tf1._view import View

tf = tensorflow.compat.v1

_API = "tf_keras.api._v1.keras"
_LEGACY = f"{_API}.__internal__.legacy"
_NAMES = ("keras", "tensorflow.keras", "tensorflow.compat.v1.keras", "tensorflow.contrib.keras")
_OLD_NAMES = {
    "backend": ("backend.tensorflow_backend",),
    "layers": tuple(
        f"layers.{name}"
        for name in (
            "advanced_activations",
            "convolutional",
            "convolutional_recurrent",
            "core",
            "cudnn_recurrent",
            "embeddings",
            "local",
            "merge",
            "noise",
            "normalization",
            "pooling",
            "recurrent",
            "wrappers",
        )
    ),
    "losses": ("objectives",),
    "utils": tuple(
        f"utils.{name}" for name in ("data_utils", "generic_utils", "io_utils", "layer_utils", "np_utils", "vis_utils")
    ),
}
"""Modules of Keras 2.2, by the module that now has their names."""

_ENGINE = ("", ".base_layer", ".input_layer", ".network", ".sequential", ".topology", ".training")
_OPTIMIZERS = ("SGD", "RMSprop", "Adagrad", "Adadelta", "Adam", "Adamax", "Nadam")
_GONE = {
    "": {"wrappers": "", "estimator": "tf.estimator.Estimator"},
    "optimizers": {
        "Ftrl": "tf.train.FtrlOptimizer",
        "legacy": "the optimizers of keras.optimizers",
        "schedules": "keras.callbacks.LearningRateScheduler",
    },
    "utils": {"multi_gpu_model": "a rank for each GPU"},
}


class _Missing:
    """Placeholder for a module of tf_keras, which is not installed."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(
            "dl_comm.tf1 needs the package tf_keras for Keras, layers and cells: run 'pip install tf_keras', or install"
            " dl_comm with its extra tf1",
            name="tf_keras",
        )


def views() -> dict[str, View]:
    """Create the views of Keras, by the names of the modules that they replace: `keras`, `tf.keras` and submodules.

    Without tf_keras, every name in them raises an ImportError with the fix.

    Raises:
        ImportError: This version of tf_keras is not supported.
    """
    found = _by_path() if importlib.util.find_spec("tf_keras") else dict.fromkeys(("", *_keras3_modules()), _Missing())
    made = {path: View(_joined("keras", path), {}, module, _keras3_module(path)) for path, module in found.items()}
    for path, old in _OLD_NAMES.items():
        made |= {name: View(f"keras.{name}", {}, found.get(path, _Missing())) for name in old}
    for name in _ENGINE:
        made[f"engine{name}"] = View(f"keras.engine{name}", _engine(found), found.get("layers"))
    for path, view in made.items():
        if path:
            parent, _, name = path.rpartition(".")
            made[parent]._own.setdefault(name, view)
        view.__dict__["_gone"].update(_GONE.get(path, {}))
    made[""]._gone.update({name: "" for name in _keras3_modules() if "." not in name and name not in made})
    if not isinstance(found[""], _Missing):
        made[""]._own["__version__"] = sys.modules["tf_keras"].__version__
        made["optimizers"]._own.update(_patch_tf_keras())
        made["backend"]._own["variable"] = _private("tf_keras.src.backend", "variable")
        _check()
    return {_joined(name, path): view for name in _NAMES for path, view in made.items()}


@functools.cache
def legacy(name: str) -> Any:
    """Return a module of TensorFlow 1 that tf_keras keeps: `layers` or `rnn_cell`.

    Without tf_keras, every name in it raises an ImportError with the fix.

    Raises:
        ImportError: This version of tf_keras is not supported.
    """
    if not importlib.util.find_spec("tf_keras"):
        return _Missing()
    try:
        return importlib.import_module(f"{_LEGACY}.{name}")
    except ModuleNotFoundError as error:
        raise _incompatible(f"{_LEGACY}.{name}") from error


def _joined(name: str, path: str) -> str:
    return f"{name}.{path}" if path else name


def _keras3_module(path: str) -> ModuleType | None:
    """Return the module of Keras 3, for packages for TensorFlow 2."""
    return sys.modules.get(_joined("keras", path))


def _keras3_modules() -> list[str]:
    """List the public modules of Keras 3, which TensorFlow has imported."""
    names = [name.removeprefix("keras.") for name in sys.modules if name.startswith("keras.")]
    return [name for name in names if not name.startswith(("src", "_"))]


def _by_path() -> dict[str, ModuleType]:
    """Import tf_keras. Return its modules by their path in Keras, which is empty for Keras itself."""
    try:
        importlib.import_module(_API)
    except ModuleNotFoundError as error:
        raise _incompatible(_API) from error
    return {
        name.removeprefix(_API).removeprefix("."): module
        for name, module in list(sys.modules.items())
        if name == _API or name.startswith(f"{_API}.")
    }


def _engine(found: dict[str, Any]) -> dict[str, Any]:
    keras = found[""]
    return {} if isinstance(keras, _Missing) else {"Model": keras.Model, "Sequential": keras.Sequential}


def _patch_tf_keras() -> dict[str, Any]:
    """Patch tf_keras to use reference variables and the optimizers of Keras 2.2.

    Returns the names of `keras.optimizers`.
    """
    _wrap_private("tf_keras.src.engine.base_layer_utils", "make_variable", _make_variable)
    _wrap_private("tf_keras.src.backend", "variable", _variable)
    _wrap_private("tf_keras.src.backend", "_get_variables", _variables_to_initialize)
    for module in ("base_layer", "base_layer_v1"):
        _wrap_private(f"tf_keras.src.engine.{module}", "Layer._get_node_attribute_at_index", _attribute_of_call)
    first = "tf_keras.src.optimizers.optimizer_v1"
    kinds = {name: _optimizer(_private(first, name)) for name in _OPTIMIZERS}
    by_name = {name.lower(): kind for name, kind in kinds.items()}

    def _deserialize(original: Any, config: Any, *arguments: Any, **options: Any) -> Any:
        kind = by_name.get(str(config["class_name"]).lower())
        return kind.from_config(config["config"]) if kind else original(config, *arguments, **options)

    deserialize = _wrap_private("tf_keras.src.optimizers", "deserialize", _deserialize)
    base = {name: _private(first, name) for name in ("Optimizer", "TFOptimizer")}
    return {**kinds, **base, **{name.lower(): kind for name, kind in kinds.items()}, "deserialize": deserialize}


def _optimizer(base: Any) -> Any:
    """Create an optimizer class that also takes `learning_rate` and `name`, as tf.keras since TensorFlow 1.13."""

    def __init__(self: Any, *arguments: Any, **options: Any) -> None:
        options.pop("name", None)
        if "learning_rate" in options:
            options["lr"] = options.pop("learning_rate")
        base.__init__(self, *arguments, **options)

    body = {
        "__init__": __init__,
        "__doc__": base.__doc__,
        "__module__": base.__module__,
        "learning_rate": property(lambda self: self.lr),
    }
    return type(base.__name__, (base,), body)


def _make_variable(original: Any, *arguments: Any, **options: Any) -> Any:
    if options.get("use_resource") is None:
        options["use_resource"] = False
    return original(*arguments, **options)


def _variable(original: Any, *arguments: Any, **options: Any) -> Any:
    def create(following: Any, **asked: Any) -> Any:
        if "use_resource" in asked:  # the recursive call below
            return following(**asked)
        return tf.Variable(**asked, use_resource=False)

    with tf.variable_creator_scope(create):
        return original(*arguments, **options)


def _variables_to_initialize(original: Any, graph: Any = None) -> list[Any]:
    """Return the variables that a session of Keras initializes where they are not: all global ones, as in Keras 2.2."""
    found = {id(variable): variable for variable in original(graph)}
    # Whether they are initialized is found out by new operations.
    if graph is not None and not graph.finalized:
        variables = graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
        found.update((id(variable), variable) for variable in variables)
    return list(found.values())


def _attribute_of_call(original: Any, layer: Any, node_index: int, attr: str, attr_name: str) -> Any:
    """Return an attribute of a call of a layer; number 0 of a model of layers is that of its own tensors."""
    if not getattr(layer, "_is_graph_network", False):
        return original(layer, node_index, attr, attr_name)
    calls = 1 + len(layer._inbound_nodes)
    if not -calls <= node_index < calls:
        raise ValueError(f"Asked to get {attr_name} at node {node_index}; the layer has {calls} inbound nodes.")
    if node_index % calls:
        return original(layer, node_index % calls - 1, attr, attr_name)
    values = layer.inputs if attr.startswith("input") else layer.outputs
    if attr.endswith("shapes"):
        values = [tuple(value.shape.as_list()) for value in values]
    return values[0] if len(values) == 1 else list(values)


def _private(module: str, name: str) -> Any:
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except (AttributeError, ModuleNotFoundError) as error:
        raise _incompatible(f"{module}.{name}") from error


def _wrap_private(module: str, name: str, wrapper: Any) -> Any:
    """Replace a function of tf_keras by one that calls `wrapper(original, ...)`, and return it."""
    original = _private(module, name)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        return wrapper(original, *arguments, **options)

    owner, _, attribute = name.rpartition(".")
    setattr(_private(module, owner) if owner else sys.modules[module], attribute, wrapped)
    return wrapped


def _check() -> None:
    """Check that layers and optimizers have reference variables, and that optimizer names mean those of Keras 2.2."""
    keras = importlib.import_module(_API)
    with tf.Graph().as_default():
        layer = keras.layers.Dense(1)
        layer.build((None, 1))
        optimizer = keras.optimizers.get("sgd")
        variables = [layer.kernel, getattr(optimizer, "lr", None)]
    wrong = [each for each in variables if getattr(each, "dtype", None) != tf.as_dtype("float32_ref")]
    if wrong:
        raise _incompatible(f"reference variables, but {wrong}")


def _incompatible(what: str) -> ImportError:
    version = getattr(sys.modules.get("tf_keras"), "__version__", "")
    return ImportError(f"dl_comm.tf1 needs {what} of tf_keras, which version {version} lacks", name=_API)
