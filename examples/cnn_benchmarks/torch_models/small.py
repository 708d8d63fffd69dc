"""Networks that a laptop trains: one that does next to nothing, and LeNet."""

from __future__ import annotations

from torch import nn


def trivial(side: int, channels: int, classes: int) -> nn.Module:
    """One hidden unit, then 4096: hardly any arithmetic, so that what remains is everything else."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(side * side * channels, 1),
        nn.ReLU(),
        nn.Linear(1, 4096),
        nn.ReLU(),
        nn.Linear(4096, classes),
    )


def lenet(side: int, channels: int, classes: int) -> nn.Module:
    """LeNet-5 (LeCun et al. 1998), with ReLU and maximum pooling; images of 28 pixels are padded to its 32."""
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=(32 - side) // 2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 5 * 5, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
    )
