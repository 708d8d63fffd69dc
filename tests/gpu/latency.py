"""Measures the parts of a call on GPU tensors with the driver alone: events, flags, copies, on one GPU.

    python tests/gpu/latency.py COUNT FILE

Medians of COUNT measurements in microseconds go to FILE as JSON: in one process, and in two that use the GPU at the
same time, whose copies show what waits for a time slice.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable
from ctypes import byref, c_size_t, c_uint, c_ulonglong, c_void_p
from pathlib import Path
from typing import Any

PAGE = 4096
NON_BLOCKING, NO_TIMING, MAPPED = 1, 2, 3
"""Flags of streams, events, and pinned memory (portable and mapped)."""
CHAIN = 32
"""Flags in a row: their cost is that of CHAIN + 1 less that of one."""
DEADLINE_S = 20
"""Limit of a wait for the other process."""
COPIES = {"to the host": "cuMemcpyDtoHAsync_v2", "to the GPU": "cuMemcpyHtoDAsync_v2"}
KIB = (1, 4, 16, 32, 64, 256, 1024)


class Gpu:
    """The first GPU through the driver's functions."""

    def __init__(self) -> None:
        self._driver: Any = ctypes.CDLL("libcuda.so.1")
        context = c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", byref(context), 0)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function of the driver."""
        if code := getattr(self._driver, name)(*arguments):
            raise SystemExit(f"latency.py: {name} failed with error {code}")

    def stream(self) -> c_void_p:
        """A stream that does not wait for the default stream."""
        made = c_void_p()
        self.call("cuStreamCreate", byref(made), NON_BLOCKING)
        return made

    def event(self) -> c_void_p:
        """An event without a time."""
        made = c_void_p()
        self.call("cuEventCreate", byref(made), NO_TIMING)
        return made

    def memory(self, size: int) -> c_ulonglong:
        """Memory of the GPU."""
        address = c_ulonglong()
        self.call("cuMemAlloc_v2", byref(address), c_size_t(size))
        return address

    def pinned(self, size: int) -> c_void_p:
        """Memory of the host that the GPU copies directly."""
        address = c_void_p()
        self.call("cuMemHostAlloc", byref(address), c_size_t(size), MAPPED)
        return address

    def mapped(self, address: int) -> c_ulonglong:
        """The address for the GPU of a page of the host."""
        found = c_ulonglong()
        self.call("cuMemHostRegister_v2", c_void_p(address), c_size_t(PAGE), MAPPED)
        self.call("cuMemHostGetDevicePointer_v2", byref(found), c_void_p(address), 0)
        return found

    def write(self, stream: c_void_p, flag: c_ulonglong, value: int) -> None:
        """Enqueues a store to a flag."""
        self.call("cuStreamWriteValue32_v2", stream, flag, c_uint(value), 0)

    def wait(self, stream: c_void_p, flag: c_ulonglong, value: int) -> None:
        """Enqueues a wait until a flag is at least ``value``."""
        self.call("cuStreamWaitValue32_v2", stream, flag, c_uint(value), 0)

    def finish(self, stream: c_void_p) -> None:
        """Waits for a stream."""
        self.call("cuStreamSynchronize", stream)

    def copy(self, name: str, on_gpu: c_ulonglong, on_host: c_void_p, size: int, stream: c_void_p) -> None:
        """Copies, one of COPIES, and waits for it."""
        ends = (on_host, on_gpu) if name == "to the host" else (on_gpu, on_host)
        self.call(COPIES[name], *ends, c_size_t(size), stream)
        self.finish(stream)


def seconds(operation: Callable[[], None]) -> float:
    """The time of an operation."""
    since = time.perf_counter()
    operation()
    return time.perf_counter() - since


def median(times: list[float]) -> float:
    """In microseconds."""
    return round(1e6 * statistics.median(times), 2)


def of_one_process(count: int) -> dict[str, float]:
    """Events, and flags in host and in GPU memory."""
    gpu = Gpu()
    one, other, event = gpu.stream(), gpu.stream(), gpu.event()
    page = mmap.mmap(-1, PAGE)
    flags = {"host": gpu.mapped(ctypes.addressof(ctypes.c_char.from_buffer(page))), "GPU": gpu.memory(PAGE)}

    def measure(operation: Callable[[], None]) -> float:
        return median([seconds(operation) for _ in range(count)])

    found = {
        "wait for an idle stream": measure(lambda: gpu.finish(one)),
        "event, recorded": measure(lambda: gpu.call("cuEventRecord", event, one)),
        "event, waited for": measure(lambda: gpu.call("cuStreamWaitEvent", other, event, 0)),
    }
    for memory, flag in flags.items():
        value = 0

        def same_stream(times: int, flag: c_ulonglong = flag) -> None:
            nonlocal value
            for _ in range(times):
                value += 1
                gpu.write(one, flag, value)
                gpu.wait(one, flag, value)
            gpu.finish(one)

        def there_and_back(times: int, flag: c_ulonglong = flag) -> None:
            nonlocal value
            for _ in range(times):
                value += 1
                gpu.wait(other, flag, value)
                gpu.write(one, flag, value)
                gpu.call("cuEventRecord", event, other)
                gpu.call("cuStreamWaitEvent", one, event, 0)
            gpu.finish(one)

        for name, chain in (("written and waited for", same_stream), ("to another stream, event back", there_and_back)):
            long = measure(lambda chain=chain: chain(1 + CHAIN))  # type: ignore[misc]
            short = measure(lambda chain=chain: chain(1))  # type: ignore[misc]
            found[f"flag in {memory} memory, {name}"] = round((long - short) / CHAIN, 2)
    return found


def of_two_processes(rank: int, page: mmap.mmap, count: int) -> dict[str, float]:
    """A barrier of two streams, and copies that both processes start at the same time."""
    gpu = Gpu()
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    stream, flags = gpu.stream(), gpu.mapped(address)
    mine, theirs = c_ulonglong(flags.value + 64 * rank), c_ulonglong(flags.value + 64 * (1 - rank))
    at_round = [c_uint.from_address(address + 2048 + 64 * each) for each in (0, 1)]
    turn = 0

    def meet() -> None:
        nonlocal turn
        turn += 1
        at_round[rank].value = turn
        until = time.monotonic() + DEADLINE_S
        while at_round[1 - rank].value < turn:
            os.sched_yield()
            if time.monotonic() > until:
                raise SystemExit("latency.py: the other process has ended, or its GPU is stuck")

    times = []
    for value in range(1, count + 1):
        meet()
        since = time.perf_counter()
        gpu.write(stream, mine, value)
        meet()  # no stream waits for a flag that is not yet enqueued
        gpu.wait(stream, theirs, value)
        gpu.finish(stream)
        times.append(time.perf_counter() - since)
    found = {"two processes: barrier of their streams": median(times)}
    on_gpu, on_host = gpu.memory(KIB[-1] << 10), gpu.pinned(KIB[-1] << 10)
    for kib in KIB:
        for name in COPIES:
            times = []
            for _ in range(count):
                meet()
                times.append(seconds(lambda n=name, k=kib: gpu.copy(n, on_gpu, on_host, k << 10, stream)))  # type: ignore[misc]
            found[f"two processes: copy of {kib} KiB {name}"] = median(times)
    meet()
    return found


def main(words: list[str]) -> int:
    """The command line."""
    if len(words) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    count = int(words[0])
    page = mmap.mmap(-1, PAGE)
    # Before the driver starts, which a forked process could not use.
    child = os.fork()
    if child == 0:
        code = 1
        try:
            of_two_processes(1, page, count)
            code = 0
        finally:
            os._exit(code)
    found = of_two_processes(0, page, count)
    if os.waitpid(child, 0)[1] != 0:
        raise SystemExit("latency.py: the second process failed")
    found |= of_one_process(count)
    for name, number in found.items():
        print(f"{number:9.2f} us  {name}")
    Path(words[1]).write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
