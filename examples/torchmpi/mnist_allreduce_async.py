"""Synchronous training: the sum of each gradient starts during backward, beside the layers before it."""

from __future__ import annotations

import torch
from common import Example, network

from dl_comm.compat.torchmpi import nn as mpinn


def main() -> None:
    """Train and test."""
    example = Example("MNIST, gradients summed during backward", lr=0.05)
    model = network()
    mpinn.synchronizeParameters(model)
    mpinn.async_.registerAsyncMPIBackward(model)
    optimizer = torch.optim.SGD(model.parameters(), example.args.lr / example.size, momentum=0.9)
    example.train(model, optimizer, lambda: mpinn.async_.synchronizeGradients(model))
    mpinn.checkWithAllreduce(model)
    example.finish(model)


if __name__ == "__main__":
    main()
