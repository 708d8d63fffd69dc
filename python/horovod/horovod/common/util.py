"""Helpers that scripts import from here: what is installed, a context of environment variables, and small functions.

Thread rule: any thread; ``env`` changes the environment of the process.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

_Item = TypeVar("_Item")

EXTENSIONS = ["tensorflow", "torch", "mxnet"]


def get_ext_suffix() -> str:
    """The end of the file name of a compiled module."""
    return str(sysconfig.get_config_var("EXT_SUFFIX") or ".so")


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raises ImportError if a framework is not installed; ``ext_name`` is ``"horovod.torch"`` or similar."""
    name = ext_name.rpartition(".")[2]
    if not extension_available(name):
        raise ImportError(f"{ext_name} needs {name}, which is not installed")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether the framework of a binding is installed; never for MXNet, which is retired."""
    return ext_base_name in ("tensorflow", "torch") and importlib.util.find_spec(ext_base_name) is not None


_cache = functools.cache


@_cache
def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether a framework sees a GPU."""
    if ext_base_name == "torch" and extension_available("torch"):
        import torch

        return torch.cuda.is_available()
    if ext_base_name == "tensorflow" and extension_available("tensorflow"):
        import tensorflow as tf

        return bool(tf.config.list_physical_devices("GPU"))
    return False


def _query(name: str) -> Callable[..., Any]:
    @_cache
    def function(verbose: bool = False) -> Any:
        from horovod.common.basics import HorovodBasics

        return getattr(HorovodBasics(), name)()

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"As ``HorovodBasics.{name}``."
    return function


mpi_built, gloo_built, nccl_built, ddl_built, ccl_built = map(
    _query, ("mpi_built", "gloo_built", "nccl_built", "ddl_built", "ccl_built")
)


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """In this context, environment variables have these values; None leaves one as it is."""
    values = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[int | None, bool | None], int]:
    """A function of ``op`` and the deprecated ``average`` that returns the operator."""

    def operator(op: int | None, average: bool | None) -> int:
        if op is not None and average is not None:
            raise ValueError("give op or average, not both: op takes the place of average")
        if average is not None:
            warnings.warn("average is deprecated: use op=hvd.Average or op=hvd.Sum", DeprecationWarning, stacklevel=5)
            return int(reduce_ops.Average if average else reduce_ops.Sum)
        return int(reduce_ops.Average) if op is None else op

    return operator


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(items: Sequence[_Item], n: int) -> list[Sequence[_Item]]:
    """Cuts a list into ``n`` parts of nearly equal lengths, the longer ones first."""
    short, longer = divmod(len(items), n)
    starts = [i * short + min(i, longer) for i in range(n + 1)]
    return [items[begin:end] for begin, end in zip(starts, starts[1:], strict=False)]


def check_installed_version(name: str, version: str, exception: BaseException | None = None) -> None:
    """Nothing: dl_comm's bindings fit the framework that is installed."""


def is_iterable(x: Any) -> bool:
    """Whether ``iter(x)`` works."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether a version is the same as ``target``, of the form ``major.minor.patch``, or later."""
    from packaging import version

    if not isinstance(ver, str) or not isinstance(target, str) or len(target.split(".")) != 3:
        raise ValueError(f"expected two texts, the second as major.minor.patch, not {ver!r} and {target!r}")
    return version.parse(ver) >= version.parse(target)
