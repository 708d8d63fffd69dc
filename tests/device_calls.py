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


class DeviceGroup:
    """A group of some ranks, made by them."""

    def __init__(self, ranks: list[int], name: str) -> None:
        """Make it; as ``dl_comm_group_create``."""
        self.handle = ctypes.c_void_p()
        members = (ctypes.c_int * len(ranks))(*ranks)
        status = _core().dl_comm_group_create(members, len(ranks), name.encode(), ctypes.byref(self.handle))
        assert status == 0, status

    def free(self) -> None:
        """End it."""
        assert _core().dl_comm_group_free(self.handle) == 0


class DeviceWork:
    """A started collective on the tensors of a GPU."""

    def __init__(
        self,
        collective: int,
        lists: list[tuple[int, int, int, int]],
        device: tuple[int, int],
        *,
        reduce: int = 0,
        root: int = 0,
        send_counts: list[int] | None = None,
        receive_counts: list[int] | None = None,
        factors: tuple[float, float] = (1.0, 1.0),
        blocks_host: bool = False,
        name: str = "",
        team: int = 0,
        group: DeviceGroup | None = None,
        timeout: float = 0,
    ) -> None:
        """Start it on a group, or that of a team; as ``dl_comm_start``.

        ``lists``: addresses of source and destination, numbers of elements, types; ``device``: the GPU and the stream.
        """
        self._core, self._work = _core(), ctypes.c_void_p()
        handle = ctypes.c_void_p() if group is None else group.handle
        buffers = (_Buffer * len(lists))(*(_Buffer(*each, 0, None) for each in lists))
        where, title = _Device(*device, int(blocks_host)), ctypes.create_string_buffer(name.encode())
        counts = [(ctypes.c_size_t * len(each))(*each) if each else None for each in (send_counts, receive_counts)]
        call = _Call(size=ctypes.sizeof(_Call), collective=collective, reduce=reduce, root=root, count=len(lists))
        call.buffers, call.device, call.name = map(ctypes.addressof, (buffers, where, title))
        call.send_counts, call.receive_counts = (None if each is None else ctypes.addressof(each) for each in counts)
        call.prescale, call.postscale = factors
        call.timeout = timeout
        if group is None:
            assert self._core.dl_comm_team_group(team, ctypes.byref(handle)) == 0
        self.status = int(self._core.dl_comm_start(handle, ctypes.byref(call), ctypes.byref(self._work)))
        if group is None:
            assert self._core.dl_comm_group_free(handle) == 0

    def ended(self) -> int:
        """Wait for its end, and return the status of the C API; to be waited for again."""
        return self.status or int(self._core.dl_comm_wait(self._work, ctypes.c_double(-1)))

    def wait(self) -> int:
        """Wait for its end, and return the status of the C API."""
        if self.status == 0:
            self.status = self.ended()
            assert self._core.dl_comm_work_free(self._work) == 0
        return self.status


def blocking_device_call(address: int, length: int, gpu: int, stream: int, name: str) -> int:
    """Averages ``length`` float32 numbers at ``address`` on team 0, in place; returns the status of the C API."""
    buffer, device = _Buffer(address, address, length, FLOAT32, 0, None), _Device(gpu, stream, 1)
    seconds = ctypes.c_double(-1)
    return int(_core().dl_comm_average_on(ctypes.byref(device), ctypes.byref(buffer), 1, 0, name.encode(), seconds))
