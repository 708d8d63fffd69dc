"""Synchronous training by a parameter server: all ranks add their gradients there, and take the sums.

It shows the server's functions; `mnist_allreduce.py` does the same faster.
"""

from __future__ import annotations

import torch
from common import Example, network

import dl_comm
from dl_comm.compat.torchmpi import nn as mpinn


def main() -> None:
    """Train and test."""
    example = Example("MNIST, gradients summed by a parameter server", lr=0.05)
    model = network()
    mpinn.synchronizeParameters(model)
    optimizer = torch.optim.SGD(model.parameters(), example.args.lr / example.size, momentum=0.9)
    gradients = [torch.zeros_like(each) for each in model.parameters()]

    with dl_comm.ParameterServer(gradients) as server:

        def sum_gradients() -> None:
            own = [each.grad for each in model.parameters()]
            if example.rank == 0:
                server.send(rule="zero")
            dl_comm.barrier()
            server.send(own)
            dl_comm.barrier()
            server.receive(own)
            dl_comm.barrier()

        example.train(model, optimizer, sum_gradients)
    mpinn.checkWithAllreduce(model)
    example.finish(model)


if __name__ == "__main__":
    main()
