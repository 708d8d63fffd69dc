"""One rank of a Python contender: runs trials, like c/trial.c for the C programs.

    python -m benchmarks.allreduce.worker NAME

NAME is a key of BACKENDS, here or in cuda.py; c/trial.h describes the environment and the protocol.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.allreduce.backends import BACKENDS, Backend
from benchmarks.allreduce.cases import UNTIMED
from benchmarks.common.worker import serve

PERIOD = 7
_TOLERANCE = {"f32": 1e-6, "f64": 1e-15, "f16": 1e-3, "bf16": 8e-3}
_BLOCK = PERIOD << 17


def barrier(rank: int, ranks: int) -> Callable[[], None]:
    """The barrier of c/spin.h."""
    library = ctypes.CDLL(os.environ["BENCH_SPIN"])
    library.spin_open.restype = ctypes.c_void_p
    spin = library.spin_open(os.environ["BENCH_BARRIER"].encode(), rank, ranks)
    if not spin:
        raise OSError(f"cannot map {os.environ['BENCH_BARRIER']}")
    wait, handle = library.spin_synchronize, ctypes.c_void_p(spin)
    wait.restype = None
    return lambda: wait(handle)


def pattern(count: int, offset: float) -> np.ndarray:
    """Element i is i mod 7, plus an offset."""
    return (np.arange(count) % PERIOD + offset).astype(np.float32)


def check(backend: Backend, tensors: list[Any], lengths: list[int], dtype: str, mean: float) -> tuple[int, str]:
    """Compares tensors with the pattern; returns the number of elements, and the first difference as text or ""."""
    if not backend.averages:
        return 0, ""
    want = pattern(min(_BLOCK, max(lengths)), mean).astype(np.float64)
    for index, (tensor, length) in enumerate(zip(tensors, lengths, strict=True)):
        for begin in range(0, length, _BLOCK):
            end = min(length, begin + _BLOCK)
            have = backend.values(tensor, begin, end)
            right = np.abs(have - want[: end - begin]) <= _TOLERANCE[dtype] * want[: end - begin]
            if have.shape != (end - begin,) or not right.all():
                at = int(np.argmin(right))
                return 0, f"tensor {index}, element {begin + at} is {have[at]}, not {want[at]}"
    return sum(lengths), ""


def trial(backend: Backend, wait: Callable[[], None], line: str) -> bytes:
    """Runs one trial and returns the answer."""
    dtype, mode, *numbers = line.split()
    slots, iterations, _, *lengths = map(int, numbers)
    if refusal := backend.refusal(dtype):
        return f"unsupported {refusal}\n".encode()
    mine = pattern(PERIOD * 64, 2 * backend.rank)
    ring = [[backend.empty(length, dtype) for length in lengths] for _ in range(slots)]
    for tensors in ring:
        for tensor in tensors:
            backend.fill(tensor, mine)
    operation, clock = backend.operation(mode), time.perf_counter
    times = np.empty(UNTIMED + iterations)
    checked, wrong = 0, ""
    result: list[Any] = []
    gc.collect()
    for i in range(UNTIMED + iterations):
        tensors = ring[i % slots]
        result = []  # free the previous result untimed
        wait()
        begin = clock()
        result = operation(tensors)
        end = clock()
        times[i] = end - begin
        if i == 0:
            wait()
            checked, wrong = check(backend, result, lengths, dtype, backend.ranks - 1)
    wait()
    if not wrong:
        more, wrong = check(backend, result, lengths, dtype, backend.ranks - 1)
        checked += more
    wait()
    if wrong:
        return f"wrong rank {backend.rank}: {wrong}\n".encode()
    return f"ok {checked}\n".encode() + times[UNTIMED:].tobytes()


def main() -> int:
    """Runs trials until the stream ends."""
    name = sys.argv[1]
    if name.startswith("cuda"):
        backend = importlib.import_module("benchmarks.allreduce.cuda").BACKENDS[name]()
    else:
        backend = BACKENDS[name]()
    wait = barrier(backend.rank, backend.ranks)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)  # glibc's
    gc.disable()

    def answer(line: str) -> bytes:
        found = trial(backend, wait, line)
        trim(0)  # give memory to the other contenders
        return found

    serve(backend.rank, answer)
    backend.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
