"""The module objects of the views: lookup of names per calling package, and errors for removed names.

Thread rule: any thread may use them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType, ModuleType
from typing import Any

_WRITTEN_FOR_TF2 = frozenset(
    (
        "dl_comm",
        "keras",
        "ml_comm",
        "tensorboard",
        "tensorflow",
        "tensorflow_datasets",
        "tensorflow_hub",
        "tensorflow_probability",
        "tf_keras",
    )
)


class View(ModuleType):
    """A module with TF1 names for scripts, and with the names of the real module for packages for TensorFlow 2.

    Lookup searches the `own` names, then the module `fallback`. A script sets attributes of the view itself.
    """

    def __init__(
        self,
        name: str,
        own: Mapping[str, Any],
        fallback: Any = None,
        real: Any = None,
        gone: Mapping[str, str] | None = None,
    ) -> None:
        """Create a module.

        Args:
            name: The name for `import`.
            own: Names that this view defines.
            fallback: The module for all other names, or None.
            real: The module for packages for TensorFlow 2; None: they see the same names as scripts.
            gone: Alternatives to names of TF1 that are not supported, even if `fallback` has them.
        """
        super().__init__(name, getattr(fallback, "__doc__", None))
        hidden = {
            "_own": dict(own),
            "_fallback": fallback,
            "_real": real,
            "_gone": dict(gone or {}),
            "__path__": list(getattr(real if real is not None else fallback, "__path__", [])),
        }
        self.__dict__.update(hidden)

    def __getattr__(self, name: str) -> Any:
        real, frame = self.__dict__["_real"], _calling_frame()
        if real is not None and frame is not None and _package(frame) in _WRITTEN_FOR_TF2:
            return getattr(real, name)
        if name == "__all__":  # for `from tensorflow import *`
            return [each for each in dir(self) if not each.startswith("_")]
        if name in self._own:
            return self._own[name]
        if name not in self._gone:
            try:
                return getattr(self._fallback, name)
            except AttributeError:
                loaded = sys.modules.get(f"{self.__name__}.{name}")  # tf.python, tf.core: modules without public names
                if loaded is not None:
                    return loaded
        error = AttributeError(self.missing_message(name, frame))
        error.__suppress_context__ = True
        raise error

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system sets a submodule as an attribute of its parent: set it on the real module.
        if self._real is not None and _package(sys._getframe(1)) == "importlib":
            setattr(self._real, name, value)
        else:
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *self._own, *(dir(self._fallback) if self._fallback is not None else ())})

    def missing_message(self, name: str, frame: FrameType | None) -> str:
        """Return the error message for a missing name, with the caller's line and the alternative."""
        symbol = f"{self.__name__}.{name}".replace("tensorflow.compat.v1.", "tensorflow.")
        if symbol.startswith("tensorflow."):
            symbol = "tf" + symbol.removeprefix("tensorflow")
        where = "" if frame is None else f" ({frame.f_code.co_filename}, line {frame.f_lineno})"
        text = f"{symbol}{where} has no equivalent in dl_comm.tf1 and TensorFlow {_version()}"
        instead = self._gone.get(name)
        return f"{text}; instead: {instead}" if instead else text


class MissingFinder:
    """Raises `View.missing_message` in import statements, which would hide an AttributeError."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        """Raise ImportError for a missing submodule of a view without a real module; ignore all others."""
        del path, target
        parent, _, child = name.rpartition(".")
        module = sys.modules.get(parent)
        if isinstance(module, View) and module._real is None:
            raise ImportError(module.missing_message(child, _calling_frame()), name=name)


def _version() -> str:
    return str(getattr(sys.modules.get("tensorflow"), "__version__", ""))


def _calling_frame() -> FrameType | None:
    """Return the frame of the caller's caller, skipping the import system."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and _package(frame) == "importlib":
        frame = frame.f_back
    return frame


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
