"""A small training that every launcher starts: it resumes from its checkpoint. See the other files of this folder.

torchrun --nproc-per-node 2 examples/launch/train.py --checkpoint model.pt
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

import dl_comm
import dl_comm.torch


def train(checkpoint: Path, epochs: int, **numbers: Any) -> float:
    """Fit y = 3 x + 1, each rank with its own samples. Without a launcher, `numbers` are those of `dl_comm.init`."""
    dl_comm.init(**numbers)
    launcher = dl_comm.topology()["launcher"]
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = dl_comm.torch.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    first = 0
    if dl_comm.broadcast_object(checkpoint.exists(), 0):
        saved = dl_comm.torch.load_checkpoint(checkpoint)
        model.load_state_dict(saved["model"])
        first = saved["epoch"]
    dl_comm.print0(f"{dl_comm.size()} ranks, started by {launcher}, begin with epoch {first}")
    generator = torch.Generator().manual_seed(dl_comm.rank())
    for epoch in range(first, epochs):
        for _ in range(50):
            inputs = torch.rand(32, 1, generator=generator)
            loss = torch.nn.functional.mse_loss(model(inputs), 3 * inputs + 1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        dl_comm.torch.save_checkpoint(checkpoint, model=model, epoch=epoch + 1)
    slope = model.weight.item()
    dl_comm.print0(f"slope {slope:.2f}")
    dl_comm.finalize()
    return slope


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Fits a line on several ranks.")
    parser.add_argument("--checkpoint", type=Path, default=Path("model.pt"))
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    train(options.checkpoint, options.epochs)
