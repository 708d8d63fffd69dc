"""What a parallel torch script also needs: learning rate schedules, and checkpoints that rank 0 writes and reads.

Thread rule: the checkpoint functions are collective, and so called by all ranks in the same order; any thread may call
them.
"""

from __future__ import annotations

import io
import os
from typing import Any

import torch

import dl_comm
from dl_comm import ArgumentError
from dl_comm._process import ensure_initialized
from dl_comm.training import Schedule


def lr_scheduler(
    optimizer: torch.optim.Optimizer, schedule: Schedule, last_epoch: int = -1
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a scheduler of torch that makes the optimizer's learning rate that of `schedule`.

    Call its `step()` after each `optimizer.step()`. The first parameter group has exactly the schedule's rates,
    whatever `lr` the optimizer was made with; the others keep their ratio to the first.

    `last_epoch` is that of torch's schedulers. Raises ArgumentError when the first group's rate is 0 and so has no
    ratio.
    """
    group = optimizer.param_groups[0]
    first = float(group.get("initial_lr", group["lr"]) if last_epoch >= 0 else group["lr"])
    if not first > 0:
        raise ArgumentError(
            f"the optimizer's learning rate is {first}; give it a positive one, the schedule replaces it"
        )
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step) / first, last_epoch)


def save_checkpoint(path: str | os.PathLike[str], **objects: Any) -> None:
    """Have rank 0 save objects to a file that `load_checkpoint` reads, while the other ranks wait; collective.

    `save_checkpoint("model.pt", model=model, optimizer=optimizer, step=step)` saves the `state_dict()` of what has
    one, and the rest as it is. The file appears, or replaces an older one, when it is complete.

    Raises the exception of rank 0 there, when it failed, and `dl_comm.CommError` with its text on the other ranks.
    """

    def write(unfinished: Any) -> None:
        states = {
            name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in objects.items()
        }
        torch.save(states, unfinished)

    ensure_initialized()
    dl_comm.write_on_rank0(path, write)


def load_checkpoint(path: str | os.PathLike[str], weights_only: bool = True) -> dict[str, Any]:
    """Return what `save_checkpoint` saved, on all ranks, though only rank 0 reads the file; collective.

    The values are those that were saved, state dicts among them, with tensors on the CPU: `model.load_state_dict(
    load_checkpoint("model.pt")["model"])`. `weights_only` is that of `torch.load`.

    Raises the exception of rank 0 there, when it cannot read the file, and `dl_comm.CommError` with its text on the
    other ranks; on all ranks what `torch.load` raises about the content.
    """
    ensure_initialized()
    content = io.BytesIO(dl_comm.read_on_rank0(path))
    loaded: dict[str, Any] = torch.load(content, map_location="cpu", weights_only=weights_only)
    return loaded
