"""Learning rate schedules, and checkpoints that rank 0 writes and reads, for torch scripts.

Thread rule: the checkpoint functions are collective: all ranks call them in the same order. Any thread may call them.
"""

from __future__ import annotations

import io
import os
from typing import Any

import torch

from dl_comm._arrays.checkpoint import read_on_rank0, write_on_rank0
from dl_comm._arrays.groups import Group
from dl_comm._base.errors import ArgumentError
from dl_comm._job.start import ensure_initialized
from dl_comm.training import Schedule


def lr_scheduler(
    optimizer: torch.optim.Optimizer, schedule: Schedule, last_epoch: int = -1
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a torch scheduler that sets the optimizer's learning rate to that of `schedule`.

    Call its `step()` after each `optimizer.step()`. The first parameter group gets exactly the schedule's rates,
    whatever its initial `lr`; the other groups keep their ratio to the first.

    `last_epoch` is that of torch's schedulers. Raises ArgumentError when the first group's rate is not positive,
    because no ratio exists then.
    """
    group = optimizer.param_groups[0]
    first = float(group.get("initial_lr", group["lr"]) if last_epoch >= 0 else group["lr"])
    if not first > 0:
        raise ArgumentError(f"the optimizer's learning rate is {first}: set a positive one; the schedule replaces it")
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step) / first, last_epoch)


def save_checkpoint(path: str | os.PathLike[str], *, group: Group | None = None, **objects: Any) -> None:
    """Save objects to a file on rank 0, for `load_checkpoint`; the other ranks wait. Collective.

    `save_checkpoint("model.pt", model=model, optimizer=optimizer, step=step)` saves the `state_dict()` of objects that
    have one, and other objects as they are. The complete file atomically replaces an older one. `group`: the ranks that
    take part, of which rank 0 saves; None: all.

    If saving fails, rank 0 raises its exception, and the other ranks raise `dl_comm.CommError` with its text.
    """

    def write(unfinished: Any) -> None:
        states = {
            name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in objects.items()
        }
        torch.save(states, unfinished)

    ensure_initialized()
    write_on_rank0(path, write, group=group)


def load_checkpoint(
    path: str | os.PathLike[str], weights_only: bool = True, *, group: Group | None = None
) -> dict[str, Any]:
    """Load the objects of `save_checkpoint` on all ranks; only rank 0 reads the file. Collective.

    Returns the saved values, including state dicts, with tensors on the CPU: `model.load_state_dict(
    load_checkpoint("model.pt")["model"])`. `weights_only` is that of `torch.load`. `group`: the
    ranks that take part, of which rank 0 reads; None: all.

    If reading fails, rank 0 raises its exception, and the other ranks raise `dl_comm.CommError` with its text. All
    ranks raise exceptions of `torch.load` about the content.
    """
    ensure_initialized()
    content = io.BytesIO(read_on_rank0(path, group=group))
    loaded: dict[str, Any] = torch.load(content, map_location="cpu", weights_only=weights_only)
    return loaded
