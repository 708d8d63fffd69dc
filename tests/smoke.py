"""A short test of an installed dl_comm: ``mpiexec -n 2 python tests/smoke.py [torch|tensorflow]``.

NumPy always; with a framework, a few steps of training whose result is compared with one process on the joined batch.
The operations of the framework are built at their first use where the package has none for it.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

import dl_comm as mc

if TYPE_CHECKING:
    import torch

STEPS, BATCH, WIDTH = 5, 4, 3


def batches(size: int) -> tuple[np.ndarray, np.ndarray]:
    """The joined batches of all ranks."""
    x = np.random.default_rng(0).normal(size=(STEPS, BATCH * size, WIDTH))
    return x, np.sin(x.sum(axis=2, keepdims=True))


def with_torch(x: np.ndarray, y: np.ndarray, part: slice) -> tuple[np.ndarray, np.ndarray]:
    """The weights after training on all ranks, and on one."""
    import torch

    import dl_comm.torch as cdl

    def train(optimizer: torch.optim.Optimizer, layer: torch.nn.Module, mine: slice) -> np.ndarray:
        for step in range(STEPS):
            optimizer.zero_grad()
            inputs, targets = torch.from_numpy(x[step, mine]), torch.from_numpy(y[step, mine])
            (layer(inputs) - targets).pow(2).mean().backward()
            optimizer.step()
        return layer.weight.detach().numpy()

    layers = []
    for seed in (1, 1, 1):
        torch.manual_seed(seed)
        layers.append(torch.nn.Linear(WIDTH, 1).double())
    ours, alone, stock = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in layers)
    expected = train(alone, layers[1], slice(None))
    _train_stock(layers[2], lambda model: train(stock, model, part))
    np.testing.assert_allclose(layers[2].weight.detach().numpy(), expected, rtol=1e-6)
    return train(cdl.DistributedOptimizer(ours), layers[0], part), expected


def _train_stock(layer: torch.nn.Module, train: Callable[[torch.nn.Module], object]) -> None:
    """Trains with stock DistributedDataParallel on the backend of torch.distributed."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("dl_comm")
    model = DistributedDataParallel(layer)
    # The optimizer has the layer's parameters.
    model.weight = layer.weight
    train(model)
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    alone = torch.ones(1)
    dist.all_reduce(alone, group=groups[dist.get_rank()])
    assert alone.item() == 1
    dist.destroy_process_group()


def with_tensorflow(x: np.ndarray, y: np.ndarray, part: slice) -> tuple[np.ndarray, np.ndarray]:
    """The weights after ``model.fit`` on all ranks, and on one."""
    import keras

    import dl_comm.keras as cdl

    def train(wrap: bool, mine: slice) -> np.ndarray:
        inputs, targets = x[:, mine].reshape(-1, WIDTH), y[:, mine].reshape(-1, 1)
        layer = keras.layers.Dense(1, kernel_initializer="ones", dtype="float64")
        model = keras.Sequential([keras.layers.Input((WIDTH,), dtype="float64"), layer])
        optimizer = keras.optimizers.SGD(0.1)
        model.compile(optimizer=cdl.DistributedOptimizer(optimizer) if wrap else optimizer, loss="mse")
        callbacks = [cdl.BroadcastCallback()] if wrap else []
        size = inputs.shape[0] // STEPS
        model.fit(inputs, targets, batch_size=size, shuffle=False, epochs=1, verbose=0, callbacks=callbacks)
        return np.asarray(layer.get_weights()[0])

    return train(True, part), train(False, slice(None))


def main() -> int:
    """Prints one line and returns 0 on success."""
    framework = sys.argv[1] if len(sys.argv) > 1 else None
    mc.init(2, 1, 0, framework)
    rank, size = mc.get_rank(), mc.get_nranks()
    (mean,) = mc.gradients([np.full(1000, rank, np.float32)], 0)
    assert (mean == (size - 1) / 2).all(), mean
    if framework:
        x, y = batches(size)
        train = {"torch": with_torch, "tensorflow": with_tensorflow}[framework]
        ours, alone = train(x, y, slice(rank * BATCH, (rank + 1) * BATCH))
        np.testing.assert_allclose(ours, alone, rtol=1e-6)
    mc.barrier()
    if rank == 0:
        print(f"smoke: {framework or 'numpy'} works on {size} ranks")
    mc.finalize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
