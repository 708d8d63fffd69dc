"""Pickles of functions, results and exceptions: by cloudpickle where it is installed.

cloudpickle also has the functions and classes of a script or notebook (``__main__``), by value: the ranks do not run
the script again. Pickle knows those of importable modules only. Any thread.
"""

from __future__ import annotations

import importlib
import io
import pickle
from types import FunctionType
from typing import Any

INSTALL = "pip install cloudpickle"


class MainError(pickle.PicklingError):
    """The object needs ``__main__``, and cloudpickle is not installed."""


def dumps(value: Any) -> bytes:
    """The pickle of ``value``.

    Raises:
        MainError: See there.
        Exception: Any other, by the methods of the object.
    """
    try:
        cloudpickle: Any = importlib.import_module("cloudpickle")
    except ImportError:
        file = io.BytesIO()
        _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
        return file.getvalue()
    data: bytes = cloudpickle.dumps(value)
    return data


class _Pickler(pickle.Pickler):
    """Pickle would write a reference to ``__main__``, which is another module on the ranks."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (FunctionType, type)):
            name = value.__qualname__
            if value.__module__ == "__main__" or "<" in name:  # <lambda>, or a function in a function
                raise MainError(f"{name} of {value.__module__} cannot be imported on the ranks: {INSTALL}")
        return NotImplemented
