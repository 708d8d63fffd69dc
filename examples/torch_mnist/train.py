"""MNIST with PyTorch on several processes: a small convolutional network.

mpiexec -n 2 python examples/torch_mnist/train.py --data-dir DIR

Where torch finds GPUs the ranks of a host take them in turn; --device cpu leaves them alone.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import dl_comm.torch
from dl_comm import training

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from mnist import Images, Labels, Progress, arguments, load, shard, steps


class Network(nn.Sequential):
    """Two convolutions, two dense layers: images [N, 1, 28, 28] to scores [N, 10]."""

    def __init__(self) -> None:
        """Make the layers, with the random initial weights of He et al. (2015)."""
        super().__init__(
            nn.Conv2d(1, 16, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 7 * 7, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.kaiming_normal_(parameter)
            else:
                nn.init.zeros_(parameter)


def evaluate(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Return the mean loss and accuracy over all ranks, each with its part of the images."""
    with torch.no_grad():
        scores = model(images)
        loss = functional.cross_entropy(scores, labels)
        accuracy = (scores.argmax(dim=1) == labels).float().mean()
    # Parts may differ by an image, and count by their length.
    return dl_comm.average_metrics({"loss": loss, "accuracy": accuracy}, weight=len(labels))


def on_device(images: Images, labels: Labels, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images [N, 1, 28, 28] and labels as tensors of `device`."""
    return torch.from_numpy(images).unsqueeze(1).to(device), torch.from_numpy(labels).to(device)


def choose_device(name: str | None) -> torch.device:
    """Return the device of this rank, as `--device` says, and make it torch's current one."""
    if (name or ("cuda" if torch.cuda.is_available() else "cpu")) == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SystemExit("--device is cuda, but torch finds no GPU")
    device = torch.device("cuda", dl_comm.local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def main() -> int:
    """Train, and return the exit status."""
    args = arguments("MNIST with PyTorch on several processes", lr=0.02, devices=("cpu", "cuda"))
    dl_comm.init()
    rank, size = dl_comm.rank(), dl_comm.size()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // dl_comm.local_size()))
    device = choose_device(args.device)
    training.seed_rank(0)  # other weights on each rank: the optimizer makes them those of rank 0

    data = load(args.data_dir, verbose=rank == 0)
    dl_comm.print0(f"training on {device.type}")
    epoch_steps = steps(data.train_images, size, args.batch_size)
    total = epoch_steps * args.epochs

    model = Network().to(device)
    optimizer = dl_comm.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9))
    # The learning rate grows from that of one rank to that of all of them over the first tenth, and falls to 0.
    rate = training.WarmUp(total // 10, training.Polynomial(training.scaled_lr(args.lr), total))
    scheduler = dl_comm.torch.lr_scheduler(optimizer, rate)

    progress = Progress(rank == 0, total, args.batch_size * size)
    for epoch in range(args.epochs):
        mine = shard(data.train_images, data.train_labels, rank, size, epoch)
        images, labels = on_device(*mine, device)
        for i in range(epoch_steps):
            batch = slice(i * args.batch_size, (i + 1) * args.batch_size)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            scheduler.step()
            progress.update(epoch * epoch_steps + i + 1, loss.item())

    part = training.shard(len(data.test_images))
    test = slice(part.start, part.stop)
    metrics = evaluate(model, *on_device(data.test_images[test], data.test_labels[test], device))
    if args.checkpoint:
        dl_comm.torch.save_checkpoint(args.checkpoint, model=model, optimizer=optimizer, scheduler=scheduler)
    dl_comm.check_replicas(model, optimizer)
    dl_comm.print0(f"test loss: {metrics['loss']:.4f}")
    dl_comm.print0(f"test accuracy: {metrics['accuracy']:.4f}")
    dl_comm.finalize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
