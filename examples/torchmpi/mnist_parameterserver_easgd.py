"""Asynchronous training by elastic averaging SGD: ranks are drawn to a center that follows all of them."""

from __future__ import annotations

import torch
from common import Example, network

import dl_comm.torch as cdl


def main() -> None:
    """Train and test."""
    example = Example("MNIST by elastic averaging SGD", lr=0.05)
    model = network()
    local = torch.optim.SGD(model.parameters(), example.args.lr, momentum=0.9)
    optimizer = cdl.EASGD(local, update_frequency=4, init_delay=50)
    example.train(model, optimizer)
    optimizer.close()
    example.finish(model)


if __name__ == "__main__":
    main()
