"""The kinds of arrays that the shared tests run on, one class each.

A test gets one as the fixture ``framework``: it makes tensors from NumPy arrays, calls ``framework.comm``, and compares
with what NumPy expects. What differs between the bindings is here. A new binding is a class more.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dl_comm

FLOATS = ["float16", "bfloat16", "float32", "float64"]
INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
COMPLEX = ["complex64", "complex128"]
NUMBERS = [*FLOATS, *INTEGERS, *COMPLEX]
ALL = [*NUMBERS, "bool"]


def dtype_of(name: str) -> Any:
    """NumPy's element type of this name."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


class Framework:
    """What the shared tests need of a framework.

    ``features`` and ``modes`` are known without an import of the framework:

    - ``out``: calls write into given tensors; ``async``: they return handles; ``numbers``: numbers stay Python's.
    - ``tensors``: ``dl_comm`` passes them on to ``comm``.
    - ``gradients``, and those that only some have: ``gradient of product``, ``gradient of reduce min``.
    - ``layers``: there is a synchronized batch normalization.

    ``modes``: how a program runs.
    """

    name: str
    features: frozenset[str] = frozenset()
    modes: tuple[str, ...] = ("eager",)
    requires: tuple[str, ...] = ()
    """The packages that must be installed."""
    comm: Any
    """The module with the collectives."""
    uses_memory_again = True
    """Whether large results lie in the memory of earlier ones."""
    graph_errors: tuple[type[Exception], ...] = ()
    """What programs in other modes than ``eager`` raise."""

    def supports(self, feature: str) -> bool:
        """Whether it has this feature."""
        return feature in self.features

    def make(self, array: Any) -> Any:
        """A new tensor with the type, shape and values of an array."""
        raise NotImplementedError

    def array(self, tensor: Any) -> Any:
        """The NumPy array of a tensor."""
        raise NotImplementedError

    def broadcast(self, x: Any, root: int = 0, **options: Any) -> Any:
        """A new tensor with the values of the root."""
        return self.comm.broadcast([x], root, **options)[0]

    def sendrecv(self, x: Any, dest: int, like: Any, source: int | None = None, **options: Any) -> Any:
        """What was received into a tensor, or a list of them, and the status."""
        return like, self.comm.sendrecv(x, dest, like, source, **options)

    def recv(self, like: Any, source: int | None = None, **options: Any) -> Any:
        """As ``sendrecv``."""
        return like, self.comm.recv(like, source, **options)

    def derivative(self, function: Callable[[Any], Any], x: Any, v: Any = None) -> tuple[Any, Any]:
        """``function(x)``, and the gradient of its inner product with ``v`` (None: with ones). Differentiable."""
        raise NotImplementedError

    def sum(self, x: Any) -> Any:
        """The sum of the elements, without axes."""
        return x.sum()

    def runner(self, function: Callable[..., Any], mode: str = "eager") -> Callable[..., Any]:
        """A function of arrays that calls ``function`` with tensors, and returns its results as arrays.

        Calls of it run the same program, which later ones need not build again.
        """
        assert mode == "eager"
        return lambda *arrays: self.arrays(function(*map(self.make, arrays)))

    def arrays(self, results: Any) -> Any:
        """Tensors in lists and tuples as arrays."""
        if isinstance(results, (list, tuple)):
            return [self.arrays(each) for each in results]
        is_plain = results is None or isinstance(results, (bool, int, float, complex))
        return results if is_plain else self.array(results)

    def check(self, found: Any, expected: Any, tolerance: float = 0.0) -> None:
        """Compares a tensor, or a list of them, with arrays; see ``same``."""
        same(self.arrays(found), expected, tolerance)

    def on_root(self, expected: Any, on_root: bool, gathered: bool = False) -> Any:
        """What to expect of a call of which only the root has the result. ``gathered``: it has the rows of all."""
        return expected if on_root else None

    @contextmanager
    def raises(self, kind: type[Exception], match: str | None = None, mode: str = "eager") -> Iterator[None]:
        """Expects an error of dl_comm, as the mode raises it."""
        with pytest.raises(kind if mode == "eager" else self.graph_errors, match=match) as raised:
            yield
        assert isinstance(dl_comm.error_of(raised.value), kind)


def same(found: Any, expected: Any, tolerance: float = 0.0) -> None:
    """Compares arrays, or lists of them: types, shapes and values."""
    if isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            same(one, other, tolerance)
    elif expected is None:
        assert found is None
    else:
        found, expected = np.asarray(found), np.asarray(expected)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        if tolerance:
            wide = np.complex128 if expected.dtype.kind == "c" else np.float64
            np.testing.assert_allclose(found.astype(wide), expected.astype(wide), rtol=tolerance, atol=tolerance)
        else:
            np.testing.assert_array_equal(found, expected)


class NumPy(Framework):
    """NumPy arrays."""

    name = "numpy"
    features = frozenset({"out", "async", "numbers"})
    comm = dl_comm

    def make(self, array: Any) -> Any:
        return np.array(array)

    def array(self, tensor: Any) -> Any:
        assert isinstance(tensor, (np.ndarray, np.generic))
        return np.asarray(tensor)

    def broadcast(self, x: Any, root: int = 0, **options: Any) -> Any:
        return super().broadcast(x.copy(), root, **options)


class Torch(Framework):
    """Tensors of PyTorch."""

    name = "torch"
    features = frozenset(
        {
            *("out", "async", "numbers", "tensors"),
            *("gradients", "gradient of product", "layers"),
        }
    )
    requires = ("torch",)

    def __init__(self) -> None:
        import torch

        import dl_comm.torch

        self.torch, self.comm = torch, dl_comm.torch
        self.uses_memory_again = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)

    def make(self, array: Any) -> Any:
        array = np.array(array)
        if array.dtype == ml_dtypes.bfloat16:  # which torch does not take
            return self.torch.from_numpy(array.view(np.int16)).view(self.torch.bfloat16)
        return self.torch.from_numpy(array)

    def array(self, tensor: Any) -> Any:
        assert isinstance(tensor, self.torch.Tensor)
        tensor = tensor.detach()
        if tensor.dtype == self.torch.bfloat16:
            return tensor.view(self.torch.int16).numpy().view(ml_dtypes.bfloat16)
        return tensor.numpy()

    def broadcast(self, x: Any, root: int = 0, **options: Any) -> Any:
        return self.comm.broadcast([x], root, in_place=False, **options)[0]

    def derivative(self, function: Callable[[Any], Any], x: Any, v: Any = None) -> tuple[Any, Any]:
        x = x if x.requires_grad else x.detach().requires_grad_()
        y = function(x)
        v = self.torch.ones_like(y) if v is None else v
        return y, self.torch.autograd.grad(y, x, v, create_graph=True)[0]


class TensorFlow(Framework):
    """Tensors of TensorFlow: eagerly, in a `tf.function`, and as a graph in a session."""

    name = "tensorflow"
    features = frozenset({"tensors", "gradients", "gradient of reduce min", "layers"})
    modes = ("eager", "function", "session")
    requires = ("tensorflow",)

    def __init__(self) -> None:
        import tensorflow as tf

        import dl_comm.tensorflow

        self.tf, self.comm = tf, dl_comm.tensorflow
        self.graph_errors = (tf.errors.OpError,)

    def make(self, array: Any) -> Any:
        return self.tf.constant(array)

    def array(self, tensor: Any) -> Any:
        assert isinstance(tensor, self.tf.Tensor)
        # The first shares memory, but cannot take a bfloat16 without axes.
        return np.asarray(tensor if tensor.shape.rank else tensor.numpy())

    def sendrecv(self, x: Any, dest: int, like: Any, source: int | None = None, **options: Any) -> Any:
        return self.comm.sendrecv(x, dest, like, source, **options)

    def recv(self, like: Any, source: int | None = None, **options: Any) -> Any:
        return self.comm.recv(like, source, **options)

    def derivative(self, function: Callable[[Any], Any], x: Any, v: Any = None) -> tuple[Any, Any]:
        with self.tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        return y, tape.gradient(y, x, v)

    def sum(self, x: Any) -> Any:
        return self.tf.reduce_sum(x)

    def on_root(self, expected: Any, on_root: bool, gathered: bool = False) -> Any:
        return expected if on_root else expected[:0] if gathered else np.zeros_like(expected)

    def runner(self, function: Callable[..., Any], mode: str = "eager") -> Callable[..., Any]:
        if mode == "session":
            return _Session(self.tf, function)
        return super().runner(self.tf.function(function, autograph=False) if mode == "function" else function)


class _Session:
    """Runs a function of arrays as a graph of TensorFlow 1, which the first call builds."""

    def __init__(self, tf: Any, function: Callable[..., Any]) -> None:
        self.tf, self.function = tf, function
        self.session: Any = None

    def __call__(self, *arrays: Any) -> Any:
        if self.session is None:
            v1 = self.tf.compat.v1
            with self.tf.Graph().as_default() as graph:
                shapes = [[None] * np.ndim(array) for array in arrays]
                pairs = zip(arrays, shapes, strict=True)
                self.fed = [v1.placeholder(np.asarray(array).dtype, shape) for array, shape in pairs]
                self.results = self.function(*self.fed)
            self.session = v1.Session(graph=graph)
        return self.session.run(self.results, dict(zip(self.fed, arrays, strict=True)))


KINDS: dict[str, type[Framework]] = {kind.name: kind for kind in (NumPy, Torch, TensorFlow)}


def installed() -> list[str]:
    """The frameworks whose packages are installed."""
    return [name for name, kind in KINDS.items() if all(importlib.util.find_spec(package) for package in kind.requires)]


@functools.cache
def get(name: str) -> Framework:
    """The framework of this name; imports it."""
    return KINDS[name]()
