"""Starts and trains as ``imagenet/main.py`` of PyTorch's examples: ``imagenet_train.py BACKEND FOLDER``.

With ``--dist-url env://``, the default here, it is one of two ranks; with ``--multiprocessing-distributed`` it spawns
both. Unlike ``main.py`` it uses DDP on CPUs, too. The second of two epochs begins with the checkpoint of the first.
"""

from __future__ import annotations

import argparse
import os
import socket
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset
from torchvision import models
from torchvision.datasets import FakeData
from torchvision.transforms import ToTensor

RANKS = 2
BATCH = 8


class Meter:
    """A mean over samples."""

    def __init__(self) -> None:
        self.sum = 0.0
        self.count = 0.0

    def update(self, value: float, samples: int) -> None:
        """Adds the mean of a batch."""
        self.sum += value * samples
        self.count += samples

    def all_reduce(self) -> None:
        """Adds the samples of the other ranks."""
        total = torch.tensor([self.sum, self.count])
        dist.all_reduce(total, dist.ReduceOp.SUM, async_op=False)
        self.sum, self.count = total.tolist()

    @property
    def mean(self) -> float:
        """The mean."""
        return self.sum / self.count


class Training:
    """Model, optimizer and schedule of a rank."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = DistributedDataParallel(models.resnet18(num_classes=4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, momentum=0.9, weight_decay=1e-4)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.5)

    def parts(self) -> dict[str, Any]:
        """What a checkpoint has."""
        return {"state_dict": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def save(self, path: str, epoch: int, best: float) -> None:
        """Writes a checkpoint; only rank 0 does."""
        state = {name: part.state_dict() for name, part in self.parts().items()}
        torch.save({"epoch": epoch, "best": best, **state}, path)

    def load(self, path: str) -> tuple[int, float]:
        """Reads the checkpoint, on each rank. Returns the epoch that comes next, and the best accuracy."""
        checkpoint = torch.load(path)
        for name, part in self.parts().items():
            part.load_state_dict(checkpoint[name])
        return checkpoint["epoch"], checkpoint["best"]

    def epoch(self, loader: DataLoader) -> Meter:
        """Trains for an epoch. Returns the loss on this rank."""
        losses = Meter()
        self.model.train()
        for images, targets in loader:
            loss = torch.nn.functional.cross_entropy(self.model(images), targets)
            losses.update(loss.item(), len(images))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        self.scheduler.step()
        return losses

    def validate(self, data: Dataset) -> tuple[Meter, Meter]:
        """Loss and accuracy of all samples; those that the ranks cannot share evenly are used by each of them."""
        sampler = DistributedSampler(data, shuffle=False, drop_last=True)
        shared = len(sampler) * dist.get_world_size()
        losses, accuracy = Meter(), Meter()
        self.model.eval()

        @torch.no_grad()
        def run(loader: DataLoader) -> None:
            for images, targets in loader:
                output = self.model(images)
                losses.update(torch.nn.functional.cross_entropy(output, targets).item(), len(images))
                accuracy.update((output.argmax(1) == targets).float().mean().item(), len(images))

        run(DataLoader(data, BATCH, sampler=sampler))
        losses.all_reduce()
        accuracy.all_reduce()
        if shared < len(data):
            run(DataLoader(Subset(data, range(shared, len(data))), BATCH))
        assert losses.count == accuracy.count == len(data)
        return losses, accuracy


def work(local: int | None, args: argparse.Namespace) -> None:
    """A rank; ``local`` is its number if it was spawned."""
    rank = int(os.environ["RANK"]) if local is None else local
    dist.init_process_group(args.backend, init_method=args.dist_url, world_size=args.world_size, rank=rank)
    assert dist.get_world_size() == RANKS
    torch.set_num_threads(1)
    data = FakeData(64, (3, 32, 32), 4, ToTensor())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, BATCH, shuffle=False, num_workers=1, sampler=sampler)
    path = os.path.join(args.folder, "checkpoint.pth.tar")
    epoch, best = 0, 0.0
    while epoch < 2:
        training = Training()
        if epoch > 0:
            epoch, best = training.load(path)
        sampler.set_epoch(epoch)
        trained = training.epoch(loader)
        tested, accuracy = training.validate(FakeData(21, (3, 32, 32), 4, ToTensor(), random_offset=len(data)))
        best = max(best, accuracy.mean)
        epoch += 1
        if rank == 0:
            training.save(path, epoch, best)
        dist.barrier()  # The others read what rank 0 has written.
    trained.all_reduce()
    assert trained.count == len(data)
    if rank == 0:
        print("backend", dist.get_backend())
        print(f"test: loss {tested.mean:.6f}, accuracy {accuracy.mean:.4f}, best {best:.4f}")
        # One number that depends on every call.
        print(f"loss {trained.mean + tested.mean:.6f}")
    dist.destroy_process_group()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("backend")
    parser.add_argument("folder")
    parser.add_argument("--dist-url", default="env://")
    parser.add_argument("--multiprocessing-distributed", action="store_true")
    args = parser.parse_args()
    if args.multiprocessing_distributed:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            args.dist_url = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        args.world_size = RANKS
        torch.multiprocessing.spawn(work, (args,), RANKS)
    else:
        args.world_size = int(os.environ["WORLD_SIZE"])
        work(None, args)


if __name__ == "__main__":
    main()
