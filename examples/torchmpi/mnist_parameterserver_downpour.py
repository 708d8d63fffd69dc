"""Asynchronous training by Downpour SGD: ranks add their changes to a server, and wait for nobody."""

from __future__ import annotations

import torch
from common import Example, network

import dl_comm.torch as cdl


def main() -> None:
    """Train and test."""
    example = Example("MNIST by Downpour SGD", lr=0.05)
    model = network()
    # The changes of all ranks add up.
    local = torch.optim.SGD(model.parameters(), example.args.lr / example.size, momentum=0.9)
    optimizer = cdl.Downpour(local, update_frequency=4, init_delay=50)
    example.train(model, optimizer)
    optimizer.close()
    example.finish(model)


if __name__ == "__main__":
    main()
