"""Measures a parameter server beside the memory: the rows of docs/asynchronous.md.

    mpiexec -n 2 python benchmarks/parameter_server.py [--mib 64] [--rounds 15]

`send` (add) and `receive` of a tensor of float32, beside NumPy's addition and copy of arrays in the same kind of
memory, in turns: by one rank while the others sleep, then by all ranks at once. Medians of the slowest rank.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

import dl_comm


def timed(action: Callable[[], object], repeats: int = 1) -> float:
    """Seconds of one call."""
    since = time.perf_counter()
    for _ in range(repeats):
        action()
    return (time.perf_counter() - since) / repeats


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, default=64, help="size of the tensor")
    parser.add_argument("--rounds", type=int, default=15, help="calls of each kind")
    args = parser.parse_args()
    dl_comm.init()
    rank, size = dl_comm.rank(), dl_comm.size()
    count = int(args.mib * (1 << 20)) // 4
    update, out = np.ones(count, np.float32), np.empty(count, np.float32)
    shared = dl_comm.shared_zeros(count, np.float32)

    with dl_comm.ParameterServer(update) as server:
        actions: dict[str, Callable[[], object]] = {
            "send": lambda: server.send(update),
            "addition": lambda: np.add(shared, update, out=shared),
            "receive": lambda: server.receive(out),
            "copy": lambda: np.copyto(out, shared),
        }
        for alone in (True, False):
            times: dict[str, list[float]] = {name: [] for name in actions}
            for _ in range(args.rounds):
                for name, action in actions.items():
                    dl_comm.barrier()
                    if not alone or rank == 0:
                        times[name].append(timed(action))
            row = np.array([statistics.median(each) if each else 0.0 for each in times.values()])
            slowest = dl_comm.allreduce(row, "max")
            if rank == 0:
                send, addition, receive, copy = 1e3 * slowest
                who = "one rank" if alone else f"{size} ranks at once"
                print(
                    f"{args.mib:g} MiB, {who}: send {send:.2f} ms, addition {addition:.2f}, ratio {send / addition:.2f}"
                )
                print(f"{args.mib:g} MiB, {who}: receive {receive:.2f} ms, copy {copy:.2f}, ratio {receive / copy:.2f}")

    few = np.ones(1024, np.float32)
    with dl_comm.ParameterServer(few) as server:
        if rank == 0:
            for name, action in (("send", lambda: server.send(few)), ("receive", lambda: server.receive(few))):
                best = min(timed(action, 2000) for _ in range(5))
                print(f"4 KiB, one rank: {name} {1e6 * best:.2f} us")
        dl_comm.barrier()
    dl_comm.finalize()


if __name__ == "__main__":
    main()
