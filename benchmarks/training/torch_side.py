"""Training with torch: without communication, with dl_comm, and with DistributedDataParallel."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.common.worker import join_gloo, numbered
from benchmarks.training.models import Model
from benchmarks.training.torch_networks import TASKS, loss
from benchmarks.training.trainer import BATCHES, LEARNING_RATE, MOMENTUM, SEED, Trainer


class TorchTrainer(Trainer):
    """Without communication."""

    def __init__(self, model: Model) -> None:
        torch.set_num_threads(1)
        torch.set_num_interop_threads(1)
        self.rank = self.join()
        torch.manual_seed(SEED)
        task = TASKS[model.network]
        self.network: Any = task.network()
        self.optimizer: Any = torch.optim.SGD(self.network.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
        self.plain = self.network
        self.distribute()
        generator = torch.Generator().manual_seed(SEED + 1 + self.rank)
        self.batches = [task.batch(model.batch, generator) for _ in range(BATCHES)]
        self.steps = 0
        self.last = math.nan

    def join(self) -> int:
        """Joins the job; returns the rank."""
        return numbered()[0]

    def distribute(self) -> None:
        """Makes network and optimizer distributed."""

    def step(self) -> None:
        inputs, classes = self.batches[self.steps % BATCHES]
        self.optimizer.zero_grad()
        value: Any = loss(self.network(inputs), classes)
        value.backward()
        self.optimizer.step()
        self.last = value.item()
        self.steps += 1

    def reported(self) -> tuple[float, float]:
        return math.nan, math.nan

    def loss(self) -> float:
        return self.last

    def parameters(self) -> Iterator[np.ndarray]:
        return (parameter.detach().numpy() for parameter in self.plain.parameters())

    def close(self) -> None:
        pass


class DlComm(TorchTrainer):
    """dl_comm.torch's optimizer."""

    def join(self) -> int:
        import dl_comm.torch as cdl

        return int(cdl.rank())

    def distribute(self) -> None:
        import dl_comm.torch as cdl

        self.optimizer = cdl.DistributedOptimizer(self.optimizer)

    def reported(self) -> tuple[float, float]:
        communication = self.optimizer.communication()
        return communication.exposed, communication.total

    def close(self) -> None:
        import dl_comm

        dl_comm.finalize()


class Ddp(TorchTrainer):
    """torch's DistributedDataParallel on gloo."""

    def join(self) -> int:
        return join_gloo()[0]

    def distribute(self) -> None:
        # dl_comm does not broadcast buffers either; the gradients do not depend on them.
        self.network = torch.nn.parallel.DistributedDataParallel(
            self.network, gradient_as_bucket_view=True, broadcast_buffers=False
        )

    def close(self) -> None:
        torch.distributed.destroy_process_group()


TRAINERS: dict[str, type[Trainer]] = {"plain": TorchTrainer, "ours": DlComm, "ddp": Ddp}
"""The trainers by the name on a worker's command line."""
