"""The same training in actors of Ray: python examples/launch/ray_train.py [CHECKPOINT]."""

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

    def train(self, checkpoint: Path, rank: int, address: str, key: str) -> float:
        """Train as `rank`."""
        return train(checkpoint, 4, rank=rank, size=RANKS, address=address, key=key)


ray.init()
workers = [Worker.remote() for _ in range(RANKS)]
address, key = ray.get(workers[0].address.remote()), secrets.token_hex()
checkpoint = Path(sys.argv[1] if sys.argv[1:] else "model.pt").absolute()
slopes = ray.get([worker.train.remote(checkpoint, rank, address, key) for rank, worker in enumerate(workers)])
assert len(set(slopes)) == 1
