"""Calls of the C API on GPU memory that no binding makes: as TensorFlow makes them, and every collective."""

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


class _Call(ctypes.Structure):
    """dl_comm_call_t."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        *((name, ctypes.c_int) for name in ("collective", "reduce", "root", "flags")),
        ("buffers", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        *((name, ctypes.c_void_p) for name in ("send_counts", "receive_counts", "name")),
        ("timeout", ctypes.c_double),
        ("device", ctypes.c_void_p),
        *((name, ctypes.c_double) for name in ("prescale", "postscale")),
        *((name, ctypes.c_void_p) for name in ("done", "context")),
    )


def _core() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(dl_comm.__file__).with_name("libdl_comm.so.0")))


def device_collective(
    collective: int,
    lists: list[tuple[int, int, int]],
    gpu: int,
    stream: int,
    root: int = 0,
    counts: list[int] | None = None,
    blocks_host: bool = False,
) -> int:
    """Runs a collective with the sum on float32 numbers of a GPU; returns the status of the C API.

    ``lists``: addresses of source and destination, and numbers of elements.
    """
    core, group = _core(), ctypes.c_void_p()
    buffers = (_Buffer * len(lists))(*(_Buffer(*each, FLOAT32, 0, None) for each in lists))
    device = _Device(gpu, stream, int(blocks_host))
    lengths = (ctypes.c_size_t * len(counts))(*counts) if counts else None
    call = _Call(size=ctypes.sizeof(_Call), collective=collective, root=root, count=len(lists))
    call.buffers, call.device = ctypes.addressof(buffers), ctypes.addressof(device)
    call.send_counts = ctypes.addressof(lengths) if lengths is not None else None
    assert core.dl_comm_team_group(0, ctypes.byref(group)) == 0
    status = int(core.dl_comm_run(group, ctypes.byref(call)))
    assert core.dl_comm_group_free(group) == 0
    return status


def blocking_device_call(address: int, length: int, gpu: int, stream: int, name: str) -> int:
    """Averages ``length`` float32 numbers at ``address`` on team 0, in place; returns the status of the C API."""
    buffer, device = _Buffer(address, address, length, FLOAT32, 0, None), _Device(gpu, stream, 1)
    seconds = ctypes.c_double(-1)
    return int(_core().dl_comm_average_on(ctypes.byref(device), ctypes.byref(buffer), 1, 0, name.encode(), seconds))
