"""torch.distributed's gloo, as collectives.c.

Its arguments are PORT RANKS RANK SECONDS LARGEST_BYTES.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

SIZES = (64, 4 << 10, 64 << 10, 512 << 10, 4 << 20, 16 << 20, 64 << 20)
RING_BYTES = 64 << 20
MOST = 2000


def operations(ranks: int, bytes_: int) -> dict[str, tuple[int, int, Callable[[torch.Tensor, torch.Tensor], object]]]:
    """By name: the elements of input and output, and the call."""
    block = -(-bytes_ // 4 // ranks)
    length, whole = bytes_ // 4, block * ranks
    return {
        "allreduce": (length, length, lambda src, dst: dist.all_reduce(src)),
        "broadcast": (length, length, lambda src, dst: dist.broadcast(src, 0)),
        "all-gather": (block, whole, lambda src, dst: dist.all_gather(list(dst.chunk(ranks)), src)),
        "reduce-scatter": (whole, block, lambda src, dst: dist.reduce_scatter_tensor(dst, src)),
        "all-to-all": (whole, whole, lambda src, dst: dist.all_to_all_single(dst, src)),
    }


def main() -> None:
    """Prints a line per collective and size: NAME BYTES MEDIAN_US, of the slowest rank."""
    port, ranks, rank = (int(word) for word in sys.argv[1:4])
    seconds, largest = float(sys.argv[4]), int(sys.argv[5])
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=ranks, rank=rank)
    torch.set_num_threads(1)
    for name in operations(ranks, SIZES[0]):
        for bytes_ in (size for size in SIZES if size <= largest):
            inputs, outputs, call = operations(ranks, bytes_)[name]
            slots = max(2, min(64, RING_BYTES // (4 * max(inputs, outputs))))
            ring = [(torch.full((inputs,), rank + 1.0), torch.zeros(outputs)) for _ in range(slots)]
            batch = 100 if bytes_ <= 4096 else 1
            times: list[float] = []
            most, turn = MOST, -3
            while turn < most:
                dist.barrier()
                begin = time.perf_counter()
                for repeat in range(batch):
                    call(*ring[(turn + 3 + repeat) % slots])
                slowest = torch.tensor([(time.perf_counter() - begin) / batch], dtype=torch.float64)
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                if turn == -1:
                    most = max(5, min(MOST, int(seconds / (slowest.item() * batch + 1e-9))))
                if turn >= 0:
                    times.append(slowest.item())
                turn += 1
            if rank == 0:
                print(name, bytes_, f"{1e6 * statistics.median(times):.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
