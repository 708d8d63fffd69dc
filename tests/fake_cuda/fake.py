"""ctypes bindings of the two fake libraries for the test programs.

LD_LIBRARY_PATH must contain the folder of the fake libraries before this module is imported. A process that forks must
do so before it calls ``start``.

Settings are numbers in the environment:

- hardware: ``FAKE_CUDA_EXCLUSIVE`` (1: another process has the devices for itself), ``FAKE_CUDA_DEVICES`` (1),
  ``FAKE_CUDA_DRIVER`` (13000), ``FAKE_CUDA_CAPABILITY`` (91), ``FAKE_CUDA_MIG``
  (number of devices that are slices of one GPU);
- unsupported features, with 1: ``FAKE_CUDA_NO_IPC``, ``FAKE_CUDA_NO_MEMOPS`` (stream waits on memory values),
  ``FAKE_CUDA_NO_PEERS`` (memory of other devices); ``FAKE_CUDA_NCCL_FAILS`` is the rank that cannot start NCCL;
- execution: ``FAKE_CUDA_DELAY_US`` (largest delay of each operation), and with 1 ``FAKE_CUDA_ONE_QUEUE`` (one queue for
  all streams), ``FAKE_CUDA_TIME_SLICES`` (kernels of processes are time-sliced), ``FAKE_CUDA_WAITING_CALLS`` (some
  calls wait for the whole context), ``FAKE_CUDA_FAULTS`` (an invalid access fails all later calls instead of aborting).
"""

from __future__ import annotations

import ctypes
import multiprocessing
import struct
from collections.abc import Callable, Set
from ctypes import byref, c_double, c_int, c_size_t, c_ubyte, c_uint, c_ulonglong, c_void_p
from multiprocessing.connection import Connection
from typing import Any

cuda: Any = ctypes.CDLL("libcuda.so.1")
nccl: Any = ctypes.CDLL("libnccl.so.2")

TYPES = ["f32", "f64", "f16", "bf16", "i8", "u8", "i32", "i64", "f32_precise", "f16_precise", "bf16_precise"]
KERNELS = [*(f"average_{name}" for name in TYPES), "copy_bytes"]
PTX = ".version 8.0\n" + "".join(
    f".visible .entry {name} (\n.param .b8 work[3648]\n)\n{{ ret; }}\n" for name in KERNELS
)


class Handle(ctypes.Structure):
    """An IPC handle."""

    _fields_ = [("reserved", c_ubyte * 64)]


class UniqueId(ctypes.Structure):
    """The unique id of an NCCL communicator."""

    _fields_ = [("internal", c_ubyte * 128)]


class Config(ctypes.Structure):
    """The head of NCCL's configuration."""

    _fields_ = [("size", c_size_t), ("magic", c_uint), ("version", c_uint), ("blocking", c_int)]


class Work(ctypes.Structure):
    """A launch of a kernel."""

    _fields_ = [
        *((name, c_ulonglong) for name in ("lists", "stop")),
        *((name, c_uint) for name in ("items", "sources", "targets", "nitems", "nsources", "ntargets", "divisor")),
        ("fills", c_uint),
        *((name, c_double) for name in ("pre", "post")),
        ("table", c_ulonglong * 448),
    ]


def big(value: int) -> c_ulonglong:
    return c_ulonglong(value)


def ok(result: int) -> None:
    """Fails if a call returned an error."""
    assert result == 0, f"error {result}"


def start(device: int = 0) -> None:
    """Makes a device's context current."""
    ok(cuda.cuInit(0))
    context = c_void_p()
    ok(cuda.cuDevicePrimaryCtxRetain(byref(context), device))
    ok(cuda.cuCtxSetCurrent(context))


def alloc(size: int) -> int:
    """Device memory."""
    address = c_ulonglong()
    ok(cuda.cuMemAlloc_v2(byref(address), c_size_t(size)))
    return address.value


def alloc_managed(size: int) -> int:
    """Managed memory."""
    address = c_ulonglong()
    ok(cuda.cuMemAllocManaged(byref(address), c_size_t(size), 1))
    return address.value


def alloc_async(size: int, on: c_void_p | None = None) -> int:
    """Memory of the device's pool."""
    address = c_ulonglong()
    ok(cuda.cuMemAllocAsync(byref(address), c_size_t(size), on))
    return address.value


class Chunks:
    """Memory that grows and shrinks in place, like torch's expandable segments: adjacent chunks of 2 MiB."""

    CHUNK = 2 << 20

    def __init__(self, most: int, device: int = 0) -> None:
        self._most, self._mapped = c_size_t(most), 0
        # CUmemAllocationProp and CUmemAccessDesc.
        self._chunk = struct.pack("4iQQ", 1, 0, 1, device, 0, 0)
        self._access = struct.pack("3i", 1, device, 3)
        address = c_ulonglong()
        ok(cuda.cuMemAddressReserve(byref(address), self._most, c_size_t(0), big(0), big(0)))
        self.address = address.value

    def grow(self) -> None:
        """Maps another chunk."""
        handle, size, end = c_ulonglong(), c_size_t(self.CHUNK), big(self.address + self._mapped)
        ok(cuda.cuMemCreate(byref(handle), size, self._chunk, big(0)))
        ok(cuda.cuMemMap(end, size, c_size_t(0), handle, big(0)))
        ok(cuda.cuMemRelease(handle))
        ok(cuda.cuMemSetAccess(end, size, self._access, c_size_t(1)))
        self._mapped += self.CHUNK

    def shrink(self) -> None:
        """Frees the last chunk."""
        self._mapped -= self.CHUNK
        ok(cuda.cuMemUnmap(big(self.address + self._mapped), c_size_t(self.CHUNK)))

    def free(self) -> None:
        """Frees all chunks."""
        while self._mapped:
            self.shrink()
        ok(cuda.cuMemAddressFree(big(self.address), self._most))


def upload(data: bytes) -> int:
    """Device memory with these contents."""
    address = alloc(len(data))
    ok(cuda.cuMemcpyHtoD_v2(big(address), data, c_size_t(len(data))))
    return address


def download(address: int, size: int) -> bytes:
    """The contents of device memory after all work on stream 0."""
    data = ctypes.create_string_buffer(size)
    ok(cuda.cuMemcpyDtoH_v2(data, big(address), c_size_t(size)))
    return data.raw


def handle_of(address: int) -> bytes:
    """The IPC handle of device memory."""
    handle = Handle()
    ok(cuda.cuIpcGetMemHandle(byref(handle), big(address)))
    return bytes(handle)


def pinned(size: int) -> int:
    """Pinned memory of the host."""
    host = c_void_p()
    ok(cuda.cuMemHostAlloc(byref(host), c_size_t(size), 0))
    assert host.value
    return host.value


def poke(address: int, value: int) -> None:
    """Writes a number to device memory immediately, without stream order."""
    cuda.fake_cuda_host_address.restype = c_void_p
    host = cuda.fake_cuda_host_address(big(address), c_size_t(4), b"poke")
    c_uint.from_address(host).value = value


def stream() -> c_void_p:
    made = c_void_p()
    ok(cuda.cuStreamCreate(byref(made), 1))
    return made


def event() -> c_void_p:
    made = c_void_p()
    ok(cuda.cuEventCreate(byref(made), 2))
    return made


def function(name: str) -> c_void_p:
    """A kernel."""
    module, found = c_void_p(), c_void_p()
    ok(cuda.cuModuleLoadDataEx(byref(module), PTX.encode(), 0, None, None))
    ok(cuda.cuModuleGetFunction(byref(found), module, name.encode()))
    return found


def launch(kernel: c_void_p, work: Work, on: c_void_p | None = None, grid: int = 2, block: int = 64) -> int:
    """Launches a kernel; returns the driver's status."""
    parameters = (c_void_p * 1)(ctypes.addressof(work))
    return int(cuda.cuLaunchKernel(kernel, grid, 1, 1, block, 1, 1, 0, on, parameters, None))


def average(
    sources: list[int],
    targets: list[int],
    count: int,
    divisor: int,
    stop: int = 0,
    inside: bool = False,
    fills: bool = False,
) -> Work:
    """Kernel arguments that average one item. Its lists are in the parameters (``inside``), or in leaked memory."""
    lists = struct.pack("QII", 0, 0, count) + struct.pack(f"{len(sources) + len(targets)}Q", *sources, *targets)
    offsets = (0, 16, 16 + 8 * len(sources))
    table = (c_ulonglong * 448).from_buffer_copy(lists.ljust(448 * 8, b"\0") if inside else bytes(448 * 8))
    at = 0 if inside else upload(lists)
    return Work(at, stop, *offsets, 1, len(sources), len(targets), divisor, int(fills), 1.0, 1.0, table)


def counters() -> list[int]:
    """Numbers of allocations, bytes in use, kernel launches, copies and questions about an address."""
    out = (ctypes.c_long * 5)()
    cuda.fake_cuda_counters(out)
    return list(out)


def together(ranks: int, body: Callable[[int, list[Connection]], None], killed: Set[int] = frozenset()) -> None:
    """Runs ``body(rank, pipes)`` in separate processes; rank 0 has pipes to all others, which have one to rank 0.

    All must end well, but for the ranks of ``killed``, which must end themselves by SIGKILL.
    """
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe() for _ in range(1, ranks)]
    ends = [[near for near, _ in pipes]] + [[far] for _, far in pipes]

    def program(rank: int) -> None:
        body(rank, ends[rank])
        # Runs the libraries' exit handlers, which multiprocessing skips.
        ctypes.CDLL(None).exit(0)

    processes = [fork.Process(target=program, args=(rank,)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [-9 if rank in killed else 0 for rank in range(ranks)]
