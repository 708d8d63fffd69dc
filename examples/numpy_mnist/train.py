"""MNIST with NumPy alone, on several processes: a two-layer network with its backward pass written out.

mpiexec -n 2 python examples/numpy_mnist/train.py --data-dir DIR
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# One thread for each core of this process's share; NumPy reads these when it is loaded.
LOCAL_SIZE = int(os.environ.get("MPI_LOCALNRANKS") or os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or 1)
THREADS = str(max(1, len(os.sched_getaffinity(0)) // LOCAL_SIZE))
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, THREADS)

import numpy as np  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

import dl_comm  # noqa: E402
from dl_comm import training  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from mnist import Images, Labels, Progress, arguments, load, shard, steps  # noqa: E402

Array = NDArray[np.float32]
HIDDEN, MOMENTUM = 256, 0.9


def initial_parameters(seed: int) -> list[Array]:
    """Return weights and biases of both layers, random as He et al. (2015) scale them."""
    random = np.random.default_rng(seed)
    first = random.normal(0.0, np.sqrt(2 / 784), (784, HIDDEN))
    second = random.normal(0.0, np.sqrt(2 / HIDDEN), (HIDDEN, 10))
    return [array.astype(np.float32) for array in (first, np.zeros(HIDDEN), second, np.zeros(10))]


def forward(parameters: list[Array], images: Images) -> tuple[Array, Array, Array]:
    """Return the flat images, the hidden layer and the probabilities of the ten digits."""
    w1, b1, w2, b2 = parameters
    inputs = images.reshape(len(images), 784)
    hidden = np.maximum(inputs @ w1 + b1, 0)
    scores = hidden @ w2 + b2
    odds = np.exp(scores - scores.max(axis=1, keepdims=True))
    return inputs, hidden, odds / odds.sum(axis=1, keepdims=True)


def loss_and_gradients(parameters: list[Array], images: Images, labels: Labels) -> tuple[float, list[Array]]:
    """Return the mean cross entropy of a batch and its gradients, in the order of the parameters."""
    inputs, hidden, probabilities = forward(parameters, images)
    rows = np.arange(len(labels))
    loss = -float(np.log(probabilities[rows, labels] + 1e-12).mean())
    d_scores = probabilities
    d_scores[rows, labels] -= 1
    d_scores /= len(labels)
    d_hidden = (d_scores @ parameters[2].T) * (hidden > 0)
    return loss, [inputs.T @ d_hidden, d_hidden.sum(axis=0), hidden.T @ d_scores, d_scores.sum(axis=0)]


def accuracy(parameters: list[Array], images: Images, labels: Labels) -> float:
    """Return the mean accuracy over all ranks, each with its part of the images."""
    hits = forward(parameters, images)[2].argmax(axis=1) == labels
    return dl_comm.average_metrics({"accuracy": hits.mean()}, weight=len(labels))["accuracy"]


def save(path: Path, parameters: list[Array]) -> None:
    """Write the parameters to a file, whatever its suffix."""
    with path.open("wb") as file:
        np.savez(file, w1=parameters[0], b1=parameters[1], w2=parameters[2], b2=parameters[3])


def main() -> None:
    """Train and test."""
    args = arguments("MNIST with NumPy on several processes", lr=0.1)
    dl_comm.init()
    rank, size = dl_comm.rank(), dl_comm.size()
    parameters = initial_parameters(seed=rank)  # different on purpose: the broadcast makes them equal
    dl_comm.broadcast(parameters, 0)

    data = load(args.data_dir, verbose=rank == 0)
    epoch_steps = steps(data.train_images, size, args.batch_size)
    total = epoch_steps * args.epochs
    progress = Progress(rank == 0, total, args.batch_size * size)
    velocity = [np.zeros_like(p) for p in parameters]
    # The learning rate grows from that of one rank to that of all of them over the first tenth, and falls to 0.
    rate = training.WarmUp(total // 10, training.Polynomial(training.scaled_lr(args.lr), total))

    for step in range(total):
        epoch, i = divmod(step, epoch_steps)
        if i == 0:
            images, labels = shard(data.train_images, data.train_labels, rank, size, epoch)
        batch = slice(i * args.batch_size, (i + 1) * args.batch_size)
        loss, grads = loss_and_gradients(parameters, images[batch], labels[batch])
        grads = dl_comm.gradients(grads, 0)
        for p, v, g in zip(parameters, velocity, grads, strict=True):
            v *= MOMENTUM
            v += g
            p -= np.float32(rate(step)) * v
        progress.update(step + 1, loss)

    part = training.shard(len(data.test_images))
    test = slice(part.start, part.stop)
    result = accuracy(parameters, data.test_images[test], data.test_labels[test])
    if args.checkpoint:
        dl_comm.write_on_rank0(args.checkpoint, lambda path: save(path, parameters))
    dl_comm.check_replicas(parameters)
    dl_comm.print0(f"test accuracy: {result:.4f}")
    dl_comm.finalize()


if __name__ == "__main__":
    main()
