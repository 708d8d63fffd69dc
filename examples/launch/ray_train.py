"""The same training in actors of Ray: python examples/launch/ray_train.py."""

from __future__ import annotations

import secrets
import socket
import sys
from pathlib import Path

import ray

sys.path.insert(0, str(Path(__file__).resolve().parent))

from train import train

RANKS = 2


@ray.remote
class Worker:
    """One rank."""

    def address(self) -> str:
        """An address of this worker's host."""
        with socket.socket() as found:
            found.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{found.getsockname()[1]}"

    def train(self, rank: int, address: str, key: str) -> float:
        """Train as `rank`."""
        return train(Path("/tmp/ray_model.pt"), 4, rank=rank, size=RANKS, address=address, key=key)


ray.init()
workers = [Worker.remote() for _ in range(RANKS)]
address, key = ray.get(workers[0].address.remote()), secrets.token_hex()
slopes = ray.get([worker.train.remote(rank, address, key) for rank, worker in enumerate(workers)])
assert len(set(slopes)) == 1
