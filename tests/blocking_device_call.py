"""A blocking average of GPU memory, as TensorFlow calls it: it returns with the result, and the stream continues."""

from __future__ import annotations

import ctypes
from pathlib import Path

import dl_comm

FLOAT32 = 2
"""DL_COMM_FLOAT32."""


class _Buffer(ctypes.Structure):
    """dl_comm_buffer_t."""

    _fields_ = (
        ("src", ctypes.c_size_t),
        ("dst", ctypes.c_size_t),
        ("length", ctypes.c_size_t),
        ("dtype", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("shape", ctypes.c_void_p),
    )


class _Device(ctypes.Structure):
    """dl_comm_device_t."""

    _fields_ = (("device", ctypes.c_int), ("stream", ctypes.c_void_p), ("waits", ctypes.c_int))


def blocking_device_call(address: int, length: int, gpu: int, stream: int, name: str) -> int:
    """Averages ``length`` float32 numbers at ``address`` on team 0, in place; returns the status of the C API."""
    core = ctypes.CDLL(str(Path(dl_comm.__file__).with_name("libdl_comm.so.0")))
    buffer, device = _Buffer(address, address, length, FLOAT32, 0, None), _Device(gpu, stream, 1)
    seconds = ctypes.c_double(-1)
    return int(core.dl_comm_average_on(ctypes.byref(device), ctypes.byref(buffer), 1, 0, name.encode(), seconds))
