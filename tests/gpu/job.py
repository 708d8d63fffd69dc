"""What a test knows of its job: rank, number of ranks, device, and the path that GPU tensors take between the ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

import dl_comm as mc

KIND = os.environ.get("DL_COMM_TEST_DEVICE", "cuda")
if KIND not in ("cuda", "cpu"):
    raise ValueError(f"DL_COMM_TEST_DEVICE is {KIND!r}; it is cuda or cpu")


@dataclass(frozen=True)
class Job:
    """One rank's view. Local; the device was made torch's current one of the thread that called ``here``."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def here(cls) -> Job:
        """That of this process, after ``mc.init``."""
        device = torch.device("cpu")
        if KIND == "cuda":
            device = torch.device("cuda", mc.local_rank() % torch.cuda.device_count())
            torch.cuda.set_device(device)
        return cls(mc.get_rank(), mc.get_nranks(), device)

    @property
    def on_gpu(self) -> bool:
        """Whether the tests run on a GPU."""
        return self.device.type == "cuda"

    @property
    def middle(self) -> float:
        """The mean of the ranks."""
        return (self.size - 1) / 2

    def gpu(self, team: int = 0) -> dict[str, Any] | None:
        """How a team carries GPU tensors; None before its first such call."""
        told: dict[str, Any] | None = mc.topology()["teams"][team]["gpu"]
        return told

    @property
    def exact(self) -> bool:
        """Whether team 0 adds in the order of the ranks, as it does for host memory: all paths but NCCL's."""
        gpu = self.gpu()
        return gpu is None or gpu["path"] != "nccl"
