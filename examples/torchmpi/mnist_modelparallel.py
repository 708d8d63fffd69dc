"""Model-parallel training: each rank has a part of the two large layers, and all ranks train on the same images."""

from __future__ import annotations

import torch
from common import Example
from torch import nn

from dl_comm.torch.nn import SplitLinear


def main() -> None:
    """Train and test."""
    example = Example("MNIST, layers split over the ranks", lr=0.05)
    # The columns of the first layer feed the rows of the second: one sum in forward, one in backward.
    model = nn.Sequential(
        nn.Flatten(),
        SplitLinear(784, 512, split="columns", gather=False),
        nn.ReLU(),
        SplitLinear(512, 10, split="rows", split_input=False),
    )
    optimizer = torch.optim.SGD(model.parameters(), example.args.lr, momentum=0.9)
    example.train(model, optimizer, parts=(0, 1))
    example.finish(model, parts=(0, 1))


if __name__ == "__main__":
    main()
