"""The benchmark's training step in PyTorch."""

from __future__ import annotations

import argparse
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import dl_comm
import dl_comm.torch
import torch_models


class Trainer:
    """A model with its optimizer, and one of the three ways to average gradients."""

    def __init__(self, args: argparse.Namespace, threads: int) -> None:
        """Build what the options say; `threads` is how many an operation may use."""
        torch.set_num_threads(threads)
        torch.manual_seed(dl_comm.rank())  # different on purpose: the ranks get equal by a broadcast
        self._format = torch.channels_last if args.data_format == "NHWC" else torch.contiguous_format
        self._net = torch_models.build(args.model, args.shape).to(memory_format=self._format)
        self._net.train()
        self.parameters = sum(parameter.numel() for parameter in self._net.parameters())
        self._forward: nn.Module = self._net
        self._group = args.variable_update == "gloo"
        bucket_mb = args.bucket_mb or 25
        if self._group:
            _start_gloo()
            self._forward = nn.parallel.DistributedDataParallel(self._net, bucket_cap_mb=bucket_mb)
        self._optimizer = _optimizer(args.optimizer, self._net, args.init_learning_rate)
        if args.variable_update == "dl_comm":
            self._optimizer = dl_comm.torch.DistributedOptimizer(
                self._optimizer,
                args.nteams or 1,
                args.nthread_per_team or 2,
                named_parameters=self._net.named_parameters(),
                bucket_mb=bucket_mb,
                team=0,
            )
            dl_comm.torch.broadcast_parameters(list(self._net.named_buffers()))

    def prepare(self, images: np.ndarray, labels: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn a batch of `data` into tensors of this framework."""
        turned = torch.from_numpy(images).permute(0, 3, 1, 2)
        return turned.contiguous(memory_format=self._format), torch.from_numpy(labels)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        """Train one step, and give its loss."""
        self._optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self._forward(images), labels)
        loss.backward()
        self._optimizer.step()
        return loss.item()

    def weights(self) -> list[Any]:
        """Give what must be equal on all ranks."""
        return list(self._net.parameters())

    def close(self) -> None:
        """End what must be ended before MPI."""
        if self._group:
            torch.distributed.destroy_process_group()

    @staticmethod
    def decode(path: Path, side: int) -> np.ndarray:
        """Read a JPEG file: the largest square in its middle, as uint8 [side, side, 3]."""
        try:
            from PIL import Image, ImageOps
        except ImportError as error:
            raise SystemExit("images for torch are read with Pillow: pip install pillow") from error
        with Image.open(path) as image:
            return np.asarray(ImageOps.fit(image.convert("RGB"), (side, side)))


def _optimizer(name: str, net: nn.Module, lr: float) -> torch.optim.Optimizer:
    parameters = net.parameters()
    if name == "rmsprop":
        return torch.optim.RMSprop(parameters, lr, alpha=0.9, eps=1.0, momentum=0.9)
    if name == "adam":
        return torch.optim.Adam(parameters, lr)
    return torch.optim.SGD(parameters, lr, momentum=0.9 if name == "momentum" else 0.0)


def _start_gloo() -> None:
    """Start torch's own process group among the ranks of mpiexec: rank 0 says where the others find it."""
    where = np.zeros(256, np.uint8)
    if dl_comm.rank() == 0:
        host = "127.0.0.1" if dl_comm.num_hosts() == 1 else socket.gethostname()
        with socket.socket() as free:
            free.bind(("", 0))
            address = f"{host} {free.getsockname()[1]}".encode()
        where[: len(address)] = np.frombuffer(address, np.uint8)
    dl_comm.broadcast([where], 0)
    host, port = where.tobytes().rstrip(b"\0").decode().split()
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=port, RANK=str(dl_comm.rank()), WORLD_SIZE=str(dl_comm.size()))
    torch.distributed.init_process_group("gloo", init_method="env://")
