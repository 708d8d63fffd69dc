"""Measures two seconds of averages and the memory-bandwidth limit of the host in the same run.

The limit is an average in place without staging, checks or matching: the arrays of all ranks of a host lie in shared
memory, and each rank averages its slice of all of them; p ranks read and write p arrays. NumPy computes it in blocks
that fit in cache, slightly slower than the memory allows.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dl_comm import _dl_comm
from dl_comm._base.text import size_text
from dl_comm.doctor._checks import Check
from dl_comm.doctor._gather import gather

_MAX_BYTES = 64 << 20
_MIN_BYTES = 1 << 20
_BLOCK = 64 << 10  # float32 elements
_SECONDS = 0.7
_SLOW_RATIO = 8.0


def check_single_rank() -> Check:
    """The check of a single rank: its copy bandwidth."""
    source = np.ones(_MAX_BYTES // 4, np.float32)
    target = np.zeros_like(source)
    times: list[float] = []
    while sum(times) < _SECONDS:
        began = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - began)
    rate = _MAX_BYTES / float(np.median(times)) / 1e9
    text = f"a single rank averages with no other; it copies {size_text(_MAX_BYTES)} at {rate:.1f} GB/s"
    return Check("bandwidth", "one rank", "ok", text, {"copy_gb_per_s": round(rate, 3)})


def check(described: dict[str, Any]) -> Check:
    """The check of a job of several ranks. Collective; team 0 exists."""
    folder = Path(described["settings"]["DL_COMM_SHM_DIR"])
    local_size, hosts = int(described["local_size"]), int(described["hosts"])
    # The largest size that fits on every host.
    size = min(gather(_available_bytes(folder, local_size), "bandwidth: available"))
    if size < _MIN_BYTES:
        text = f"not measured: {folder}, or the memory, has less than {size_text(_MIN_BYTES * local_size)} free"
        return Check("bandwidth", "average", "warn", text, {"room_bytes": size})
    average = _average(size)
    limit = _limit(size, folder, described)
    ratio = average / limit
    facts = {
        "bytes": size,
        "average_s": average,
        "limit_s": limit,
        "average_gb_per_s": round(size / average / 1e9, 3),
        "limit_gb_per_s": round(size / limit / 1e9, 3),
        "ratio": round(ratio, 3),
        "local_ranks": local_size,
        "hosts": hosts,
    }
    text = (
        f"{described['size']} ranks average {size_text(size)} of float32 in {average * 1e3:.1f} ms "
        f"({facts['average_gb_per_s']:.2f} GB/s a rank); memory-bandwidth limit {limit * 1e3:.1f} ms "
        f"({facts['limit_gb_per_s']:.2f} GB/s): {ratio:.1f} times the limit"
    )
    if hosts > 1:
        return Check("bandwidth", "average", "ok", f"{text}; this includes the network between the hosts", facts)
    if ratio > _SLOW_RATIO:
        text += f", more than {_SLOW_RATIO:.0f}: other programs are running, or ranks share processors"
        return Check("bandwidth", "average", "warn", text, facts)
    return Check("bandwidth", "average", "ok", text, facts)


def _available_bytes(folder: Path, local_size: int) -> int:
    """The largest possible size of an array on this host, in bytes: a multiple of 4 KiB."""
    usage = os.statvfs(folder)
    free = usage.f_bavail * usage.f_frsize
    memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # Half of the free space; a quarter of the memory, because it holds the arrays twice; at most 1 GiB in total.
    room = min(_MAX_BYTES, free // 2 // local_size, memory // 4 // local_size, (1 << 30) // local_size)
    return room - room % 4096


def _average(size: int) -> float:
    array = np.ones(size // 4, np.float32)
    return _measure(lambda: _dl_comm.average([array], [array], 0, "doctor: bandwidth"), "bandwidth: averages")


def _limit(size: int, folder: Path, described: dict[str, Any]) -> float:
    """The seconds of the limit on the slowest host. Collective."""
    ranks: list[dict[str, Any]] = described["ranks"]
    me, local_size = ranks[described["rank"]], int(described["local_size"])
    path = ""
    if me["local_rank"] == 0:
        made, path = tempfile.mkstemp(dir=folder, prefix="dl_comm.doctor.")
        os.posix_fallocate(made, 0, size * local_size)
        os.close(made)
    try:
        paths = gather(path, "bandwidth: file")
        leader = next(rank["rank"] for rank in ranks if rank["host_index"] == me["host_index"])
        arrays = np.memmap(paths[leader], np.float32, "r+", shape=(local_size, size // 4))
        _dl_comm.barrier()  # all ranks have mapped it
    finally:
        if path:
            os.unlink(path)
    arrays[me["local_rank"]] = 1
    return _measure(lambda: _average_slice(arrays, me["local_rank"]), "bandwidth: limit")


def _average_slice(arrays: NDArray[np.float32], local_rank: int) -> None:
    """Averages this rank's slice of all arrays in place, then waits at a barrier."""
    count, length = arrays.shape
    bounds = range(local_rank * length // count, (local_rank + 1) * length // count)
    total = np.empty(min(_BLOCK, len(bounds)), np.float32)
    for begin in range(bounds.start, bounds.stop, _BLOCK):
        block = arrays[:, begin : min(begin + _BLOCK, bounds.stop)]
        part = total[: block.shape[1]]
        part[:] = block[0]
        for other in block[1:]:
            part += other
        part *= np.float32(1 / count)
        block[:] = part
    _dl_comm.barrier()


def _measure(work: Callable[[], None], name: str) -> float:
    """The median time of ``work`` in seconds, equal on all ranks. ``work`` is collective."""
    began = time.perf_counter()
    work()  # touch the memory
    work()
    once = (time.perf_counter() - began) / 2
    rounds = int(np.clip(_SECONDS / max(gather(once, name)), 3, 100))
    times = []
    for _ in range(rounds):
        _dl_comm.barrier()
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return float(max(gather(float(np.median(times)), name)))
