"""The job of a test: rank, number of ranks, device, and the path of GPU tensors."""

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
    """The job of this rank. Local; ``here`` makes the device torch's current one in the calling thread."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def here(cls) -> Job:
        """The job of this process, after ``mc.init``."""
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
        """The GPU path of a team; None before its first call on GPU tensors."""
        gpu: dict[str, Any] | None = mc.topology()["teams"][team]["gpu"]
        return gpu

    @property
    def exact(self) -> bool:
        """Whether team 0 adds in rank order, as in host memory: all paths but NCCL."""
        gpu = self.gpu()
        return gpu is None or gpu["path"] != "nccl"
