"""Functions shared by the processes of Python contenders."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Callable


def serve(rank: int, answer: Callable[[str], bytes]) -> None:
    """Sends the rank, then answers lines until the stream ends; see `processes.Processes.trial`."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ["BENCH_SOCKET"])
        connection.sendall(f"rank {rank}\n".encode())
        for line in connection.makefile("r"):
            connection.sendall(answer(line))


def numbered() -> tuple[int, int]:
    """Rank and size of a process without a launcher."""
    return int(os.environ["BENCH_RANK"]), int(os.environ["BENCH_RANKS"])


def join_gloo() -> tuple[int, int]:
    """Joins the job's process group of torch.distributed with gloo; returns `numbered`. Collective."""
    rank, ranks = numbered()
    distributed = importlib.import_module("torch.distributed")
    store = f"file://{os.environ['BENCH_STORE']}"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    return rank, ranks
