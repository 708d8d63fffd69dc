"""Arrays in the memory of the fake GPU, similar to CuPy's: allocated, filled and read through the driver."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import numpy as np

_cuda = ctypes.CDLL("libcuda.so.1")
_context: list[ctypes.c_void_p] = []
_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_naps: list[object] = []


def call(name: str, *arguments: Any) -> None:
    """Calls a function of the driver, in the context of GPU 0 (or that of ``use``)."""
    code = getattr(_cuda, name)(*arguments)
    assert code == 0, f"{name}: error {code}"


def use(ordinal: int) -> None:
    """Selects GPU ``ordinal`` in this thread."""
    call("cuInit", 0)
    context = ctypes.c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
    call("cuCtxSetCurrent", context)
    _context[:] = [context]


def counters() -> list[int]:
    """This process's numbers of allocations, bytes in use, kernel launches, copies and questions about an address.

    Memory that was freed is in use as long as others have it open.
    """
    numbers = (ctypes.c_long * 5)()
    _cuda.fake_cuda_counters(numbers)
    return list(numbers)


class Stream:
    """A stream."""

    def __init__(self) -> None:
        self.handle = ctypes.c_void_p()
        call("cuStreamCreate", ctypes.byref(self.handle), 1)

    def sleep(self, milliseconds: int) -> None:
        """Keeps the stream busy."""
        nap = _HOST_FUNCTION(lambda _: time.sleep(milliseconds / 1000))
        _naps.append(nap)
        code = _cuda.fake_cuda_enqueue(self.handle, nap, None)
        assert code == 0

    def is_idle(self) -> bool:
        """Whether all its work is complete."""
        return int(_cuda.cuStreamQuery(self.handle)) == 0

    def capture(self, begins: bool) -> None:
        """Begins or ends the capture of the stream into a graph."""
        if begins:
            call("cuStreamBeginCapture_v2", self.handle, 0)
        else:
            call("cuStreamEndCapture", self.handle, ctypes.byref(ctypes.c_void_p()))


class Graph:
    """What a stream has been given since its capture began, which ends here."""

    def __init__(self, stream: Stream) -> None:
        self._graph, self._executable = ctypes.c_void_p(), ctypes.c_void_p()
        call("cuStreamEndCapture", stream.handle, ctypes.byref(self._graph))
        call("cuGraphInstantiateWithFlags", ctypes.byref(self._executable), self._graph, ctypes.c_ulonglong(0))

    def launch(self, stream: Stream) -> None:
        """Runs it again."""
        call("cuGraphLaunch", self._executable, stream.handle)

    def destroy(self) -> None:
        """Frees it; replays under way go on."""
        call("cuGraphExecDestroy", self._executable)
        call("cuGraphDestroy", self._graph)


class Array:
    """An array on the current GPU with the values of a NumPy array, copied on its stream.

    It is where ``at`` says, or else in memory of its own.
    """

    def __init__(self, values: np.ndarray, stream: Stream | None = None, at: int | None = None) -> None:
        self.host = np.ascontiguousarray(values)
        self.stream = stream
        self.address = ctypes.c_ulonglong(at or 0)
        if at is None:
            call("cuMemAlloc_v2", ctypes.byref(self.address), ctypes.c_size_t(max(self.host.nbytes, 1)))
        self._pinned = ctypes.c_void_p()
        call("cuMemHostAlloc", ctypes.byref(self._pinned), ctypes.c_size_t(max(self.host.nbytes, 1)), 0)
        self.put(self.host)

    def put(self, values: np.ndarray) -> None:
        """Copies values to the array, in stream order."""
        raw = np.ascontiguousarray(values)
        ctypes.memmove(self._pinned, raw.ctypes.data, raw.nbytes)
        call("cuMemcpyHtoDAsync_v2", self.address, self._pinned, ctypes.c_size_t(raw.nbytes), self._handle)

    def get(self) -> np.ndarray:
        """The values after all work of the stream."""
        size = ctypes.c_size_t(self.host.nbytes)
        call("cuMemcpyDtoHAsync_v2", self._pinned, self.address, size, self._handle)
        call("cuStreamSynchronize", self._handle)
        found = np.empty_like(self.host)
        ctypes.memmove(found.ctypes.data, self._pinned, found.nbytes)
        return found

    def peek(self) -> np.ndarray:
        """The current values, without waiting for the stream."""
        size = ctypes.c_size_t(self.host.nbytes)
        found = np.empty_like(self.host)
        call("cuMemcpyDtoH_v2", found.ctypes.data_as(ctypes.c_void_p), self.address, size)
        return found

    def free(self) -> None:
        """Frees the memory after all work of the stream."""
        call("cuStreamSynchronize", self._handle)
        call("cuMemFree_v2", self.address)
        call("cuMemFreeHost", self._pinned)

    @property
    def shape(self) -> tuple[int, ...]:
        """The extents."""
        return self.host.shape

    @property
    def dtype(self) -> np.dtype:
        """The element type."""
        return self.host.dtype

    @property
    def _handle(self) -> ctypes.c_void_p:
        return self.stream.handle if self.stream else ctypes.c_void_p(0)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.host.shape,
            "typestr": self.host.dtype.str,
            "data": (self.address.value, False),
            "version": 3,
            "strides": None,
            "stream": self.stream.handle.value if self.stream else None,
        }
