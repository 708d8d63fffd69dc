"""Elastic averaging over groups: two halves of the ranks train synchronously, and are drawn to a common center."""

from __future__ import annotations

import torch
from common import Example, network

import dl_comm
import dl_comm.torch as cdl


def main() -> None:
    """Train and test."""
    example = Example("MNIST by elastic averaging over synchronous groups", lr=0.05)
    model = network()
    group = dl_comm.split(2 * example.rank // example.size, name="half")
    local = torch.optim.SGD(model.parameters(), example.args.lr, momentum=0.9)
    synchronous = cdl.DistributedOptimizer(local, named_parameters=model.named_parameters(), group=group)
    optimizer = cdl.EASGD(synchronous, update_frequency=4, init_delay=50, group=group)
    example.train(model, optimizer)
    optimizer.close()
    example.finish(model)


if __name__ == "__main__":
    main()
