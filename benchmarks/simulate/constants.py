"""The constants of the model: measured for this host, published for networks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import numpy as np

from benchmarks.simulate import ranks
from benchmarks.simulate.cost import NetworkModel
from benchmarks.simulate.model import Host

# A full Ethernet frame has 1538 bytes with preamble and gap; with TCP time stamps, 1448 are data.
_TCP_ON_ETHERNET = 1538 / 1448
NETWORKS = {
    # 24.6 us and 117 MB/s: MPICH over TCP, https://gist.github.com/jfgrimm/3af692a5475bdd4ed836b5a18197a209; a further
    # message costs the system calls to send and receive it, as in the core's default network.
    "1 GbE, TCP": NetworkModel(25e-6, 5e-6, 8 / 1e9 * _TCP_ON_ETHERNET),
    # An assumption: a faster wire and card leave the operating system's part of the latency above.
    "25 GbE, TCP": NetworkModel(15e-6, 3e-6, 8 / 25e9 * _TCP_ON_ETHERNET),
    # About 2 us with kernel bypass on Ethernet: https://news-blogs.cisco.com/performance/mpi-over-40gb-ethernet
    # (1.93 us); RoCE packets of 4096 bytes in 4096 + 62 + 20 (Ethernet, IP, UDP and InfiniBand headers, preamble and
    # gap); messages as below.
    "100 GbE, RoCE": NetworkModel(2e-6, 0.3e-6, 8 / 100e9 * (4096 + 82) / 4096),
    # 1.2 us for a byte with MPI: https://docs.azure.cn/en-us/virtual-machines/hbv3-performance (HDR), more through the
    # switches of a large cluster. Packets of 4096 bytes with headers of 30. A further message:
    # a conservative assumption; one process sends millions of messages a second.
    "HDR InfiniBand": NetworkModel(1.7e-6, 0.2e-6, 8 / 200e9 * 66 / 64 * (4096 + 30) / 4096),
}
"""Networks by name."""

SERVER = Host(add=1e-10, memory=1 / 160e9, barrier_s=1e-6)
"""A server with eight channels of DDR4-3200: 204.8 GB/s, four fifths of it in practice."""

_LONG = 64 << 20
_CACHED = 128 << 10
_TIMES = 7


def measure_host() -> Host:
    """Measures this host: additions in cache, copies on all processors, a call of two ranks."""
    one, other = (np.ones(_CACHED // 4, np.float32) for _ in range(2))
    add = _seconds(lambda: np.add(one, other, out=one)) / _CACHED
    processors = len(os.sched_getaffinity(0))
    pairs = [(np.ones(_LONG // 4, np.float32), np.zeros(_LONG // 4, np.float32)) for _ in range(min(processors, 16))]
    with ThreadPoolExecutor(len(pairs)) as pool:
        copied = _seconds(lambda: list(pool.map(lambda pair: np.copyto(pair[1], pair[0]), pairs)))
    memory = copied / (2 * _LONG * len(pairs))
    (short,) = ranks.on_this_host(2, [ranks.Trial(bytes=64, warm=100, calls=300)]).results
    return Host(add, memory, median(short.seconds))


def _seconds(work: Callable[[], object]) -> float:
    """The median time in seconds; short work is repeated."""
    work()
    times = []
    for _ in range(_TIMES):
        began, count = time.perf_counter(), 0
        while count == 0 or time.perf_counter() - began < 0.01:
            work()
            count += 1
        times.append((time.perf_counter() - began) / count)
    return median(times)
