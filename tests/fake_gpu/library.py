"""A library of arrays on the fake GPU that cannot be written, similar to JAX: it exchanges them by DLPack only.

Structures and capsules are made and read here, by ctypes. An array's values are there once its stream has come to them.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from arrays import Array as Memory
from arrays import Stream, call

_py = ctypes.pythonapi
_py.PyCapsule_New.restype = ctypes.py_object
_py.PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_py.PyCapsule_GetPointer.restype = ctypes.c_void_p
_py.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_py.PyCapsule_SetName.argtypes = (ctypes.py_object, ctypes.c_char_p)
_NAMES = (b"dltensor", b"dltensor_versioned")
_USED = (b"used_dltensor", b"used_dltensor_versioned")


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("kind", ctypes.c_int),
        ("ordinal", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("code", ctypes.c_ubyte),
        ("bits", ctypes.c_ubyte),
        ("lanes", ctypes.c_ushort),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    )


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("major", "minor")),
        *((name, ctypes.c_void_p) for name in ("context", "deleter")),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


# Code and bits of DLPack. bfloat16 is uint16 for NumPy.
CODES = {
    **{f"int{bits}": (0, bits) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (1, bits) for bits in (8, 16, 32, 64)},
    **{f"float{bits}": (2, bits) for bits in (16, 32, 64)},
    **{f"complex{bits}": (5, bits) for bits in (64, 128)},
    "bfloat16": (4, 16),
    "bool": (6, 8),
}
TYPES = {value: name for name, value in CODES.items()}


def of_numpy(dtype: str) -> str:
    """NumPy's type for the bits of ``dtype``."""
    return "uint16" if dtype == "bfloat16" else dtype


class Array:
    """Values that nobody may write, unless ``writable``. From version 1 of DLPack (``major``) on, they say so."""

    major = 0
    writable = False
    # Those that the capsules of all arrays keep.
    exported = 0

    def __init__(self, values: np.ndarray, dtype: str | None = None, naps: int = 0) -> None:
        self.stream = Stream()
        self.dtype, self.shape = dtype or values.dtype.name, values.shape
        self.memory = Memory(np.zeros_like(values), self.stream)
        if naps:
            self.stream.sleep(naps)
        self.memory.put(values)
        # Another library that wants the values on the stream waits for this.
        self._ready = ctypes.c_void_p()
        call("cuEventCreate", ctypes.byref(self._ready), 2)
        call("cuEventRecord", self._ready, self.stream.handle)
        self.given_streams: list[Any] = []

    def get(self) -> np.ndarray:
        """The values, once they are there."""
        return self.memory.get()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, _device_of(self.memory.address.value)

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        if options and not self.major:
            raise TypeError(f"unexpected keyword arguments {sorted(options)}")
        self.given_streams.append(stream)
        handle = ctypes.c_void_p({1: 0}.get(stream, stream) or 0)
        call("cuStreamWaitEvent", handle, self._ready, 0)
        return _capsule(self)


_kept: dict[int, tuple[Any, ...]] = {}


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _destroy(capsule: int) -> None:
    # As a number: the object is being deleted, and a reference would revive it.
    get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", _py))
    valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _py))
    for name in _NAMES:
        if valid(capsule, name):
            _forget(get(capsule, name))


@_DELETER
def _forget(address: int) -> None:
    del _kept[address]
    Array.exported -= 1


def _capsule(array: Array) -> Any:
    axes = len(array.shape)
    steps = [int(np.prod(array.shape[axis + 1 :])) for axis in range(axes)]
    shape, strides = (ctypes.c_int64 * axes)(*array.shape), (ctypes.c_int64 * axes)(*steps)
    # The offset is part of the address.
    address = array.memory.address.value
    code, bits = CODES[array.dtype]
    tensor = _Tensor(address - 64, *array.__dlpack_device__(), axes, code, bits, 1, shape, strides, 64)
    deleter = ctypes.cast(_forget, ctypes.c_void_p)
    made: Any
    if array.major:
        made = _Versioned(array.major, 3, None, deleter, int(not array.writable), tensor)
    else:
        made = _Managed(tensor, None, deleter)
    _kept[ctypes.addressof(made)] = (made, shape, strides, array)
    Array.exported += 1
    return _py.PyCapsule_New(ctypes.addressof(made), _NAMES[bool(array.major)], ctypes.cast(_destroy, ctypes.c_void_p))


class Imported:
    """An array of another library, taken over by ``from_dlpack``. ``major``: of the version that was asked for."""

    def __init__(self, source: Any, major: int) -> None:
        self.stream = Stream()
        options = {"max_version": (1, 0)} if major else {}
        capsule = source.__dlpack__(stream=self.stream.handle.value, **options)
        name = _NAMES[bool(major)]
        address = _py.PyCapsule_GetPointer(capsule, name)
        self._made = (_Versioned if major else _Managed).from_address(address)
        _py.PyCapsule_SetName(capsule, _USED[bool(major)])
        tensor = self._made.tensor
        assert (tensor.kind, tensor.ordinal) == source.__dlpack_device__()
        assert tensor.lanes == 1
        self.shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
        self.dtype = TYPES[tensor.code, tensor.bits]
        steps = [int(np.prod(self.shape[axis + 1 :])) for axis in range(tensor.ndim)]
        assert [tensor.strides[axis] for axis in range(tensor.ndim)] == steps
        self.address = (tensor.data or 0) + tensor.offset

    def get(self) -> np.ndarray:
        """The values, as its stream has them."""
        found = np.empty(self.shape, of_numpy(self.dtype))
        if found.size:
            call("cuStreamSynchronize", self.stream.handle)
            size, where = ctypes.c_size_t(found.nbytes), ctypes.c_ulonglong(self.address)
            call("cuMemcpyDtoH_v2", found.ctypes.data_as(ctypes.c_void_p), where, size)
        return found

    def free(self) -> None:
        """Give the memory back, on any thread."""
        made, self._made = self._made, None
        if made is not None:
            _DELETER(made.deleter)(ctypes.addressof(made))

    def __del__(self) -> None:
        self.free()


def from_dlpack(source: Any) -> Imported:
    """As ``jax.dlpack.from_dlpack``."""
    return Imported(source, Array.major)


def _device_of(address: int) -> int:
    ordinal = ctypes.c_int()
    call("cuPointerGetAttribute", ctypes.byref(ordinal), 9, ctypes.c_ulonglong(address))
    return ordinal.value
