"""Modules of `dl_comm.torch` for `torch.nn`: a model in flat blocks, and a layer that is split over ranks.

Both re-create what TorchMPI offers for Torch 7. Thread rule: as torch modules.
"""

from __future__ import annotations

from dl_comm.torch._block_sequential import BlockSequential
from dl_comm.torch._split_linear import SplitLinear

__all__ = ["BlockSequential", "SplitLinear"]


def __dir__() -> list[str]:
    return sorted(__all__)
