"""One of two ranks in test_gpu_faults.py: ``fault_rank.py CASE FOLDER``.

Rank 1 causes the fault. Rank 0 detects it, then waits for its GPU, which must not hang. Both write their results to
FOLDER/rankN.json for the test; only values are asserted here.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import dl_comm as mc
import dl_comm.torch as cdl
from job import Job

sys.path.insert(0, str(Path(__file__).parent.parent))

from observations import Observations  # noqa: E402

SHORT, LONG = 1000, 3_000_000
"""Elements of averages: one-shot and two-shot."""
SECOND = 2_000_000_000
"""GPU cycles, approximately."""


class Rank:
    """This rank and its results."""

    def __init__(self, folder: Path) -> None:
        mc.init(nthread_per_team=2, nteams=1)
        self.job = Job.here()
        self.record = Observations(folder / f"rank{self.job.rank}.json").record
        for count in (SHORT, LONG):
            self.record(f"before {count}", lambda count=count: self.mean(count))
        print(f"rank {self.job.rank}: {self.job.gpu()}", flush=True)
        mc.barrier()

    def mean(self, count: int) -> None:
        """An average with a checked value."""
        (found,) = self.start(count)
        assert bool((found == self.job.middle).all())

    def start(self, count: int) -> list[torch.Tensor]:
        """An average whose value is not read."""
        return cdl.gradients([torch.full((count,), float(self.job.rank), device=self.job.device)], 0, name=f"{count}")

    def synchronize(self) -> None:
        """Waits for the GPU."""
        if self.job.on_gpu:
            torch.cuda.synchronize()

    def busy(self, seconds: int) -> None:
        """Keeps the GPU's stream busy; the host continues."""
        if self.job.on_gpu:
            torch.cuda._sleep(seconds * SECOND)


def killed_before(rank: Rank, count: int) -> None:
    """Rank 1 never makes the call."""
    if rank.job.rank == 1:
        time.sleep(0.5)  # rank 0 waits in the call
        os.kill(os.getpid(), signal.SIGKILL)
    rank.record("call", lambda: rank.start(count))


def killed_after(rank: Rank, count: int) -> None:
    """Rank 1 makes the call, and is killed before its GPU runs it; through the host, its call waits for the GPU."""
    if rank.job.rank == 1:
        gpu = rank.job.gpu()
        rank.busy(2 if gpu and gpu["path"] == "staged" else 10)
        rank.start(count)
        os.kill(os.getpid(), signal.SIGKILL)
    rank.record("call", lambda: rank.start(count))


def late(rank: Rank, count: int) -> None:
    """Rank 1 misses the deadline."""
    if rank.job.rank == 1:
        time.sleep(9)
    else:
        rank.record("call", lambda: rank.start(count))


def busy(rank: Rank, count: int) -> None:
    """Rank 1 makes the call, but its GPU is busy until after the deadline."""
    if rank.job.rank == 1:
        rank.busy(9)
    rank.record("call", lambda: rank.start(count))


CASES = {"killed_before": killed_before, "killed_after": killed_after, "late": late, "busy": busy}


def main() -> None:
    """Runs one case on this rank."""
    case, size = sys.argv[1].split("-")
    rank = Rank(Path(sys.argv[2]))
    CASES[case](rank, {"short": SHORT, "long": LONG}[size])
    rank.record("synchronize", rank.synchronize)
    rank.record("again", lambda: rank.mean(SHORT))
    rank.record("finalize", mc.finalize)


if __name__ == "__main__":
    main()
