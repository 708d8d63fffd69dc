"""What the examples of this folder share: command line, network, data, training loop.

Each example is one of TorchMPI's: mpiexec -n 2 python examples/torchmpi/mnist_allreduce.py --data-dir DIR
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import dl_comm
import dl_comm.torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from mnist import Data, Progress, arguments, load, shard, steps


def network() -> nn.Sequential:
    """A small convolutional network: images [N, 1, 28, 28] to scores [N, 10]."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


class Example:
    """A job with its arguments and data. `lr` is the default learning rate."""

    def __init__(self, description: str, lr: float) -> None:
        """Start the ranks, and load the images."""
        self.args = arguments(description, lr)
        dl_comm.init()
        self.rank, self.size = dl_comm.rank(), dl_comm.size()
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // dl_comm.local_size()))
        torch.manual_seed(self.rank)  # different on purpose: each example makes the weights equal
        self.data: Data = load(self.args.data_dir, verbose=self.rank == 0)

    def images(self, epoch: int, part: int, parts: int, train: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """Give images [N, 1, 28, 28] and labels of one of `parts` equal parts, shuffled by epoch."""
        data = self.data
        arrays = (data.train_images, data.train_labels) if train else (data.test_images, data.test_labels)
        images, labels = shard(*arrays, part, parts, epoch)
        return torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels)

    def train(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        on_backward: Callable[[], object] = lambda: None,
        parts: tuple[int, int] | None = None,
    ) -> None:
        """Train on this rank's part of the images.

        `on_backward` is called before each step. `parts`: the number of the part and of all, if it is not the rank's.
        """
        part, of = parts or (self.rank, self.size)
        batch, epochs = self.args.batch_size, self.args.epochs
        count = steps(self.data.train_images, of, batch)
        progress = Progress(self.rank == 0, count * epochs, batch * of)
        for epoch in range(epochs):
            images, labels = self.images(epoch, part, of)
            for step in range(count):
                part_of = slice(step * batch, (step + 1) * batch)
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(images[part_of]), labels[part_of])
                loss.backward()
                on_backward()
                optimizer.step()
                progress.update(epoch * count + step + 1, loss.item())

    def finish(self, model: nn.Module, parts: tuple[int, int] | None = None) -> None:
        """Print the accuracy on the test images, over all ranks, and end."""
        images, labels = self.images(0, *(parts or (self.rank, self.size)), train=False)
        with torch.no_grad():
            correct = (model(images).argmax(dim=1) == labels).float().mean()
        accuracy = dl_comm.torch.average(correct, "accuracy").item()
        dl_comm.finalize()
        if self.rank == 0:
            print(f"test accuracy: {accuracy:.4f}")
