"""GPU arrays of CuPy, Numba and others: objects with ``__cuda_array_interface__`` (version 3, or 2 with a stream).

A call starts after the earlier work on the arrays' stream, and later work on that stream sees the result. The arrays
name their stream; None is the GPU's default stream. Version 2 does not know streams: nothing says when the data of
such an array is there.
"""

from __future__ import annotations

import sys
from typing import Any

from dl_comm import _dl_comm
from dl_comm._cuda import preload
from dl_comm._errors import ArgumentError, DTypeError

_TYPES = {"<f2": 0, "<f4": 2, "<f8": 3, "|i1": 4, "|u1": 5, "<i4": 6, "<i8": 7, "|b1": 8}


def all_on_gpu(arrays: list[Any]) -> bool:
    """Whether all arrays are in GPU memory.

    Raises ArgumentError when only some are.
    """
    on_device = [hasattr(array, "__cuda_array_interface__") for array in arrays]
    if any(on_device) and not all(on_device):
        raise ArgumentError("some arrays are in GPU memory and some are not; use separate calls")
    return all(on_device)


def gradients(arrays: list[Any], team: int, name: str | None, limit: float, out: list[Any] | None) -> list[Any]:
    """The means over all ranks, in ``out`` or in new arrays of the same library."""
    means = [_like(array) for array in arrays] if out is None else out
    device, stream, descriptors = _device_arrays(arrays, means)
    _dl_comm.average_on(device, stream, descriptors, team, name, limit)
    return means


def broadcast(arrays: list[Any], root: int, limit: float) -> list[Any]:
    """Overwrites the arrays with the values of rank ``root``, and returns them."""
    device, stream, descriptors = _device_arrays(arrays, arrays)
    _dl_comm.broadcast_on(device, stream, descriptors, root, None, limit)
    return arrays


def _like(array: Any) -> Any:
    """A new array; CuPy's have no namespace of the array API."""
    if hasattr(array, "__array_namespace__"):
        return array.__array_namespace__().empty_like(array)
    library = sys.modules.get(type(array).__module__.partition(".")[0])
    if library is not None and hasattr(library, "empty_like"):
        return library.empty_like(array)
    raise ArgumentError(f"dl_comm cannot make arrays like a {type(array).__name__}; pass out=, arrays for the means")


def _device_arrays(
    sources: list[Any], targets: list[Any]
) -> tuple[int, int, list[tuple[int, int, int, int, list[int]]]]:
    """The GPU, the stream, and per array: source address, target address, length, dtype code and shape."""
    preload()
    if len(sources) != len(targets):
        raise ArgumentError(f"out has {len(targets)} arrays; expected {len(sources)}, as tensors")
    device, descriptors = -1, []
    streams: set[int] = set()
    for index, (source, target) in enumerate(zip(sources, targets, strict=True)):
        source_info, target_info = _interface(source, index), _interface(target, index)
        if (source_info["shape"], source_info["typestr"]) != (target_info["shape"], target_info["typestr"]):
            raise ArgumentError(f"array {index}: source and destination differ")
        if target_info["data"][1]:
            raise ArgumentError(f"array {index} is read-only; pass a copy of it")
        shape = [int(extent) for extent in source_info["shape"]]
        length = 1
        for extent in shape:
            length *= extent
        for interface in (source_info, target_info) if length else ():
            owner = _dl_comm.device_of_pointer(interface["data"][0])
            if owner != device and device >= 0:
                raise ArgumentError(f"array {index} is on GPU {owner}, the arrays before it on GPU {device}")
            device = owner
        streams |= {stream for stream in (source_info.get("stream"), target_info.get("stream")) if stream is not None}
        code = _TYPES.get(source_info["typestr"])
        if code is None:
            raise DTypeError(
                f"array {index} has the element type {source_info['typestr']}, which dl_comm does not have"
            )
        descriptors.append((int(source_info["data"][0]), int(target_info["data"][0]), length, code, shape))
    if device < 0:
        raise ArgumentError("the arrays are empty, or their memory is not on a GPU that this process uses")
    if len(streams) > 1:
        raise ArgumentError("the arrays are on different streams; use one stream, or separate calls")
    return device, streams.pop() if streams else 0, descriptors


def _interface(array: Any, index: int) -> dict[str, Any]:
    found: dict[str, Any] = array.__cuda_array_interface__
    if found.get("strides") is not None and not _is_dense(found):
        raise ArgumentError(f"array {index} is not C-contiguous; pass a contiguous copy of it")
    if found["version"] < 3 and "stream" not in found:
        raise ArgumentError(
            f"array {index}, a {type(array).__name__}, does not name its stream (its __cuda_array_interface__ has "
            f"version {found['version']}), so no call can wait for its data; pass cupy.from_dlpack(array).copy()"
        )
    if found.get("mask") is not None:
        raise ArgumentError(f"array {index} has a mask, which cannot be averaged")
    return found


def _is_dense(interface: dict[str, Any]) -> bool:
    step = int(interface["typestr"][2:])
    for extent, stride in zip(reversed(interface["shape"]), reversed(interface["strides"]), strict=True):
        if extent != 1 and stride != step:
            return False
        step *= extent
    return True
