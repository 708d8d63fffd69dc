"""What one of two ranks does in test_gpu_faults.py: ``fault_rank.py CASE FOLDER``.

Rank 1 does what the case is called; rank 0 finds out, then waits for its GPU: that must not take for ever, whatever it
waits for there. Both write what they saw to FOLDER/rankN.json. Nothing is asserted but that values are right: the test
reads what was written.
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
"""Elements of averages: by one shot, and by two."""
SECOND = 2_000_000_000
"""Cycles of a GPU, about."""


class Rank:
    """This rank, and what it has seen."""

    def __init__(self, folder: Path) -> None:
        mc.init(nthread_per_team=2, nteams=1)
        self.job = Job.here()
        self.record = Observations(folder / f"rank{self.job.rank}.json").record
        for count in (SHORT, LONG):
            self.record(f"before {count}", lambda count=count: self.mean(count))
        print(f"rank {self.job.rank}: {self.job.gpu()}", flush=True)
        mc.barrier()

    def mean(self, count: int) -> None:
        """An average that must be right, looked at."""
        (found,) = self.start(count)
        assert bool((found == self.job.middle).all())

    def start(self, count: int) -> list[torch.Tensor]:
        """An average that nobody looks at."""
        return cdl.gradients([torch.full((count,), float(self.job.rank), device=self.job.device)], 0, name=f"{count}")

    def synchronize(self) -> None:
        """Waits for the GPU."""
        if self.job.on_gpu:
            torch.cuda.synchronize()

    def busy(self, seconds: int) -> None:
        """Keeps the GPU's stream busy; the host goes on."""
        if self.job.on_gpu:
            torch.cuda._sleep(seconds * SECOND)


def killed_before(rank: Rank, count: int) -> None:
    """Rank 1 never makes the call."""
    if rank.job.rank == 1:
        time.sleep(0.5)  # rank 0 waits in the call
        os.kill(os.getpid(), signal.SIGKILL)
    rank.record("call", lambda: rank.start(count))


def killed_after(rank: Rank, count: int) -> None:
    """Rank 1 makes the call, and dies before its GPU comes to it."""
    if rank.job.rank == 1:
        rank.busy(10)
        rank.start(count)
        os.kill(os.getpid(), signal.SIGKILL)
    rank.record("call", lambda: rank.start(count))


def late(rank: Rank, count: int) -> None:
    """Rank 1 does not come before the deadline."""
    if rank.job.rank == 1:
        time.sleep(9)
    else:
        rank.record("call", lambda: rank.start(count))


def busy(rank: Rank, count: int) -> None:
    """Rank 1 comes, but its GPU has other things to do until after the deadline."""
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
