"""Synchronous training: the gradients are summed over the ranks after backward."""

from __future__ import annotations

import torch
from common import Example, network

from dl_comm.compat.torchmpi import nn as mpinn


def main() -> None:
    """Train and test."""
    example = Example("MNIST, gradients summed after backward", lr=0.05)
    model = network()
    mpinn.synchronizeParameters(model)
    # The gradients are sums: each rank's share of the learning rate.
    optimizer = torch.optim.SGD(model.parameters(), example.args.lr / example.size, momentum=0.9)
    example.train(model, optimizer, lambda: mpinn.synchronizeGradients(model))
    mpinn.checkWithAllreduce(model)
    example.finish(model)


if __name__ == "__main__":
    main()
