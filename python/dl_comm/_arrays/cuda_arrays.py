"""Arrays in GPU memory of JAX, CuPy, Numba and others: what a collective needs of them, and results like them.

An array has ``__dlpack__``, or ``__cuda_array_interface__`` with the stream that orders its use, or both. On a named
stream a call starts after the earlier work, and later work sees the result. Otherwise ``__dlpack__`` orders the earlier
work, and as nothing tells the library of later one, the call blocks until the results are in memory.

Thread rule: any thread may call every function and use every object.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dl_comm import _dl_comm
from dl_comm._base.cuda import preload
from dl_comm._base.errors import ArgumentError, DTypeError

_KINDS = (2, 13)
"""CUDA's memory and its managed memory, of DLPack."""
_DEFAULT_STREAM = 1
"""CUDA's legacy default stream, of DLPack and ``__cuda_array_interface__``."""
_REFUSALS = (BufferError, TypeError, ValueError, RuntimeError)
"""What libraries raise for arrays that they cannot share, such as those of several GPUs."""
# The code of dl_comm.h, code and bits of DLPack, and the text of NumPy.
_TYPES = {
    "float16": (0, (2, 16), "<f2"),
    "bfloat16": (1, (4, 16), ""),
    "float32": (2, (2, 32), "<f4"),
    "float64": (3, (2, 64), "<f8"),
    "int8": (4, (0, 8), "|i1"),
    "uint8": (5, (1, 8), "|u1"),
    "int32": (6, (0, 32), "<i4"),
    "int64": (7, (0, 64), "<i8"),
    "bool": (8, (6, 8), "|b1"),
    "uint16": (9, (1, 16), "<u2"),
    "uint32": (10, (1, 32), "<u4"),
    "uint64": (11, (1, 64), "<u8"),
    "int16": (12, (0, 16), "<i2"),
    "complex64": (13, (5, 64), "<c8"),
    "complex128": (14, (5, 128), "<c16"),
}
_BY_DLPACK = {(*kind, 1): name for name, (_, kind, _) in _TYPES.items()}
_BY_TEXT = {text: name for name, (_, _, text) in _TYPES.items() if text}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DeviceArray:
    """An array in GPU memory in C order: a result of a library without ``from_dlpack``, or an argument of a call.

    A result can be passed to every library with DLPack or ``__cuda_array_interface__``, and to dl_comm. It is complete:
    its use needs no stream. Its memory is freed with the last array that shares it::

        y = dl_comm.allreduce(x)  # x: an array of Numba
        kernel[blocks, threads](y)
        z = cupy.from_dlpack(y)

    Attributes:
        shape: The extents.
        dtype: The name of the element type.
        device: The ordinal of the GPU in this process.
    """

    shape: tuple[int, ...]
    dtype: str
    device: int
    _address: int
    _keeper: Any
    # None: any.
    _stream: int | None = None
    _is_writable: bool = True
    _blocks: bool = True
    # Of the caller; None for memory of dl_comm.
    _given: Any = None
    # The array whose library makes the result.
    _origin: Any = None

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype!r}, device={self.device})"

    def __dlpack_device__(self) -> tuple[int, int]:
        return _KINDS[0], self.device

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError("a DeviceArray makes no copies")
        is_versioned = max_version is not None and max_version[0] >= 1
        return self._keeper.capsule(_TYPES[self.dtype][1], self.shape, is_versioned)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        text = _TYPES[self.dtype][2]
        if not text:
            raise AttributeError(f"__cuda_array_interface__ has no {self.dtype}; use __dlpack__")
        data = (self._address, False)
        return {"shape": self.shape, "typestr": text, "data": data, "strides": None, "version": 3, "stream": None}


def is_on_gpu(value: Any) -> bool:
    """Whether it is an array in GPU memory."""
    if isinstance(value, DeviceArray) or hasattr(value, "__cuda_array_interface__"):
        return True
    if isinstance(value, (np.ndarray, np.generic)) or not hasattr(value, "__dlpack_device__"):
        return False
    try:
        return value.__dlpack_device__()[0] in _KINDS
    except _REFUSALS as error:
        raise ArgumentError(f"a {type(value).__name__} cannot be exchanged by DLPack: {error}") from error


def any_on_gpu(arrays: Iterable[Any]) -> bool:
    """Whether some of the arrays of a call are in GPU memory."""
    return any(isinstance(array, DeviceArray) for array in arrays)


def device_array(array: Any, what: str) -> DeviceArray:
    """What a call needs of an array in GPU memory. ``what`` names it in errors.

    Raises ArgumentError and DTypeError as the collectives.
    """
    if isinstance(array, DeviceArray):
        return array
    preload()
    interface = getattr(array, "__cuda_array_interface__", None)
    stream, is_named = None, False
    if interface is not None:
        stream = _DEFAULT_STREAM if interface.get("stream") == 0 else interface.get("stream")
        is_named = stream is not None or interface["version"] >= 3
    if hasattr(array, "__dlpack__"):
        found = _by_dlpack(array, what, _DEFAULT_STREAM if stream is None else stream)
        if not is_named:
            stream = _DEFAULT_STREAM
    elif not is_named:
        raise ArgumentError(
            f"{what}, a {type(array).__name__}, does not name its stream (its __cuda_array_interface__ has version "
            f"{interface['version'] if interface else None}) and has no __dlpack__, so no call can wait for its data"
        )
    else:
        found = _by_interface(interface or {}, what, array)
    if interface is not None:
        found = replace(found, _is_writable=not interface["data"][1])
    if found._address and math.prod(found.shape):
        owner = _dl_comm.device_of_pointer(found._address)
        if owner < 0:
            raise ArgumentError(f"the memory of {what} is not on a GPU that this process uses")
        found = replace(found, device=owner)
    return replace(found, _stream=stream, _blocks=not is_named, _given=array, _origin=array)


def _by_dlpack(array: Any, what: str, stream: int) -> DeviceArray:
    try:
        capsule = _capsule(array, stream)
        kind, ordinal, address, dtype, shape, strides, read_only = _dl_comm.read_dlpack(capsule)
    except _REFUSALS as error:
        raise ArgumentError(f"{what}, a {type(array).__name__}, cannot be exchanged by DLPack: {error}") from error
    if kind not in _KINDS:
        raise ArgumentError(f"{what} says that it is on a GPU, but its memory is not")
    if dtype not in _BY_DLPACK:
        raise DTypeError(f"{what} has an element type that dl_comm does not have (DLPack's code, bits, lanes: {dtype})")
    _check_order(shape, strides, 1, what)
    # Without a version it does not say whether it may be written.
    return DeviceArray(tuple(shape), _BY_DLPACK[dtype], ordinal, address, capsule, _is_writable=read_only is False)


def _capsule(array: Any, stream: int) -> Any:
    try:
        return array.__dlpack__(stream=stream, max_version=(1, 0))
    except TypeError:
        # Before DLPack 1.0.
        return array.__dlpack__(stream=stream)


def _by_interface(interface: dict[str, Any], what: str, array: Any) -> DeviceArray:
    text, shape = interface["typestr"], tuple(map(int, interface["shape"]))
    if interface.get("mask") is not None:
        raise ArgumentError(f"{what} has a mask, which may differ between ranks; fill it in")
    if text not in _BY_TEXT:
        raise DTypeError(f"{what} has the element type {text}, which dl_comm does not have")
    _check_order(shape, interface.get("strides"), int(text[2:]), what)
    return DeviceArray(shape, _BY_TEXT[text], -1, int(interface["data"][0] or 0), array)


def _check_order(shape: Sequence[int], strides: Sequence[int] | None, step: int, what: str) -> None:
    """Raises ArgumentError unless the elements are in C order without gaps. ``step``: of one element."""
    if strides is None or 0 in shape:
        return
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != step:
            raise ArgumentError(f"{what} is not C-contiguous; pass a contiguous copy of it")
        step *= extent


def new_like(array: DeviceArray, shape: tuple[int, ...]) -> DeviceArray:
    """A new array with the element type of ``array``, for a result.

    A library with arrays that can be written makes it, in its own pool of memory; else the memory is dl_comm's.
    """
    empty = next(_functions(array._given, "empty"), None)
    if empty is not None and not array._blocks and hasattr(array._given, "dtype"):
        return device_array(empty(shape, dtype=array._given.dtype), "the result")
    size = math.prod(shape) * _TYPES[array.dtype][1][1] // 8
    if size and array.device < 0:
        raise ArgumentError("the arrays are empty and do not say their GPU; pass out=, arrays for the results")
    memory = _dl_comm.device_memory(max(array.device, 0), size)
    return DeviceArray(shape, array.dtype, array.device, memory.address, memory, _origin=array._origin)


def broadcast_into(arrays: list[Any], in_place: bool) -> list[Any]:
    """Where a broadcast of arrays in GPU memory writes: into themselves, as far as they can be written, or new ones."""
    in_core(arrays, None)
    return [each if in_place and each._is_writable else new_like(each, each.shape) for each in arrays]


def with_axis(array: Any) -> Any:
    """The same array, of one element if it has no axes."""
    if not isinstance(array, DeviceArray):
        return np.atleast_1d(array)
    return array if array.shape else replace(array, shape=(1,))


def handed(array: Any) -> Any:
    """What the caller gets: the array that was given, or a new one of its library."""
    if not isinstance(array, DeviceArray):
        return array
    if array._given is not None:
        return array._given
    from_dlpack = next(_functions(array._origin, "from_dlpack"), None)
    return array if from_dlpack is None else from_dlpack(array)


def _functions(array: Any, name: str) -> Iterator[Callable[..., Any]]:
    """The functions of this name in the library of an array: its namespace of the array API, else its package."""
    spaces = [array.__array_namespace__()] if hasattr(array, "__array_namespace__") else []
    spaces.append(sys.modules.get(type(array).__module__.partition(".")[0]))
    return (getattr(space, name) for space in spaces if hasattr(space, name))


def in_core(sources: list[Any] | None, destinations: list[Any] | None) -> tuple[Any, Any]:
    """The arrays of a call as the core takes them: those of NumPy as they are.

    Raises ArgumentError when they are not all in host memory, or on one GPU and one stream, or cannot be written.
    """
    arrays = [*(sources or ()), *(destinations or ())]
    on_gpu = [array for array in arrays if isinstance(array, DeviceArray)]
    if not on_gpu:
        return sources, destinations
    if len(on_gpu) < len(arrays):
        raise ArgumentError("some arrays are in GPU memory and some are not; use separate calls")
    devices = sorted({array.device for array in on_gpu} - {-1})
    if len(devices) != 1:
        where = f"on the GPUs {devices}; use separate calls" if devices else "empty, and do not say their GPU"
        raise ArgumentError(f"the arrays are {where}")
    streams = {array._stream for array in on_gpu} - {None}
    if len(streams) > 1:
        raise ArgumentError("the arrays are on different streams; use one stream, or separate calls")
    for index, array in enumerate(destinations or ()):
        if not array._is_writable:
            raise ArgumentError(f"array {index} is read-only, or does not say that it may be written; pass another one")
    stream = next(iter(streams), _DEFAULT_STREAM)
    place = (devices[0], 0 if stream == _DEFAULT_STREAM else stream, any(array._blocks for array in on_gpu))

    def described(listed: list[Any] | None) -> list[tuple[Any, ...]] | None:
        if listed is None:
            return None
        # The tuple keeps the memory for a call that was started.
        return [(each._address, _TYPES[each.dtype][0], each.shape, place, each._keeper) for each in listed]

    return described(sources), described(destinations)
