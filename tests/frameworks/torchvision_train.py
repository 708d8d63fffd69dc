"""Starts and trains as torchvision's ``references/classification/train.py``: ``torchvision_train.py BACKEND FOLDER``.

It starts by the variables of torchrun, else of Slurm, else alone, which is a failure here. It trains on CPUs, without
SyncBatchNorm, which torch has for GPUs only. The second of two epochs begins with the checkpoint of the first.
"""

from __future__ import annotations

import argparse
import builtins
import os
import sys
from collections import defaultdict

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import FakeData

RANKS = 2
BATCH = 8


def init_distributed_mode(args: argparse.Namespace) -> bool:
    """Makes this process a rank, if the environment says so."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        args.rank, args.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        args.local_rank = int(os.environ["LOCAL_RANK"])
    elif "SLURM_PROCID" in os.environ:
        args.rank = int(os.environ["SLURM_PROCID"])
    else:
        return False
    dist.init_process_group(args.backend, init_method=args.dist_url, world_size=args.world_size, rank=args.rank)
    dist.barrier()
    print_on_rank_0(args.rank)
    return True


def print_on_rank_0(rank: int) -> None:
    """Makes ``print`` do nothing on other ranks, unless it is given ``force=True``."""
    stock = builtins.print

    def own(*values: object, force: bool = False, **options: object) -> None:
        if rank == 0 or force:
            stock(*values, **options)

    builtins.print = own


def reduce_across_processes(value: float | list[float]) -> torch.Tensor:
    """The sum over all ranks."""
    total = torch.tensor(value)
    dist.barrier()
    dist.all_reduce(total)
    return total


class MetricLogger:
    """Means by name."""

    def __init__(self) -> None:
        self.totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])

    def update(self, samples: int, **values: float) -> None:
        """Adds the means of a batch."""
        for name, value in values.items():
            self.totals[name][0] += samples
            self.totals[name][1] += value * samples

    def synchronize_between_processes(self) -> None:
        """Adds the samples of the other ranks."""
        for name, total in self.totals.items():
            self.totals[name] = reduce_across_processes(total).tolist()

    def __getitem__(self, name: str) -> float:
        count, total = self.totals[name]
        return total / count


def train_one_epoch(
    model: nn.Module, criterion: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, ema: nn.Module
) -> MetricLogger:
    """Returns the metrics of this rank."""
    metrics = MetricLogger()
    model.train()
    for images, targets in loader:
        loss = criterion(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ema.update_parameters(model)
        metrics.update(len(images), loss=loss.item())
    return metrics


@torch.inference_mode()
def evaluate(model: nn.Module, criterion: nn.Module, loader: DataLoader) -> MetricLogger:
    """Returns the metrics of all ranks."""
    metrics = MetricLogger()
    model.eval()
    samples = 0
    for images, targets in loader:
        output = model(images)
        correct = (output.argmax(1) == targets).float().mean().item()
        metrics.update(len(images), loss=criterion(output, targets).item(), accuracy=correct)
        samples += len(images)
    # The sampler repeats samples, so that all ranks have as many.
    assert reduce_across_processes(samples).item() == len(loader.sampler) * RANKS
    metrics.synchronize_between_processes()
    return metrics


def save_on_master(state: dict[str, object], path: str) -> None:
    """Writes a checkpoint on rank 0."""
    if dist.get_rank() == 0:
        torch.save(state, path)


def run_epoch(args: argparse.Namespace, path: str) -> tuple[int, float]:
    """Trains one epoch, the next one of a checkpoint if there is one. Returns its number and a loss."""
    to_tensor = torchvision.transforms.ToTensor()
    data = FakeData(64, (3, 32, 32), 4, to_tensor)
    tested = FakeData(21, (3, 32, 32), 4, to_tensor, random_offset=len(data))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, BATCH, sampler=sampler, num_workers=1)
    test_loader = DataLoader(tested, BATCH, sampler=DistributedSampler(tested, shuffle=False), num_workers=1)

    torch.manual_seed(1 + args.rank)  # DDP takes the model of rank 0.
    model = torchvision.models.get_model("mobilenet_v3_small", weights=None, num_classes=4)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.RMSprop(model.parameters(), 0.001, momentum=0.9, weight_decay=1e-5, eps=0.0316, alpha=0.9)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=1)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[1])
    model = nn.parallel.DistributedDataParallel(model)
    ema = torch.optim.swa_utils.AveragedModel(
        model.module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    parts = {"model": model.module, "optimizer": optimizer, "lr_scheduler": scheduler, "model_ema": ema}
    epoch = 0
    if os.path.exists(path):
        checkpoint = torch.load(path, map_location="cpu", weights_only=False)
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
        epoch = checkpoint["epoch"] + 1

    sampler.set_epoch(epoch)
    metrics = train_one_epoch(model, criterion, optimizer, loader, ema)
    scheduler.step()
    results = [evaluate(each, criterion, test_loader) for each in (model, ema)]
    state = {name: part.state_dict() for name, part in parts.items()}
    save_on_master({**state, "epoch": epoch, "args": args}, path)
    metrics.synchronize_between_processes()
    print(f"epoch {epoch}: test loss {results[0]['loss']:.6f}, of the mean model {results[1]['loss']:.6f}")
    print(f"training loss {metrics['loss']:.6f}, accuracy {results[0]['accuracy']:.4f}")
    # One number that depends on every call.
    return epoch, metrics["loss"] + results[0]["loss"] + results[1]["loss"]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("backend")
    parser.add_argument("folder")
    parser.add_argument("--dist-url", default="env://")
    parser.add_argument("--world-size", default=1, type=int)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not init_distributed_mode(args):
        print("Not using distributed mode")
    if not dist.is_initialized() or dist.get_world_size() != RANKS:
        sys.exit(f"trains alone, not on {RANKS} ranks")
    path = os.path.join(args.folder, "checkpoint.pth")
    for expected in range(2):
        epoch, loss = run_epoch(args, path)
        assert epoch == expected
        dist.barrier()  # The others read what rank 0 has written.
    print("backend", dist.get_backend())
    print(f"loss {loss:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
