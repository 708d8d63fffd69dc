"""A sampler that knows which samples of an epoch are done.

    sampler = hvd.elastic.ElasticSampler(dataset)
    for i, batch in enumerate(DataLoader(dataset, batch_size=32, sampler=sampler)):
        sampler.record_batch(i, 32)
    sampler.set_epoch(epoch + 1)

Thread rule: the training thread.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sized

import torch

from horovod.common._names import rank, size

__all__ = ["ElasticSampler"]


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Gives each rank as many of an epoch's samples that are not yet done; some twice if the ranks do not divide them.

    Args:
        dataset: The samples; of one length on all ranks.
        shuffle: In another order each epoch.
        seed: Of that order, equal on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch, of which no sample is done. Call it at the end of the epoch before."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Counts a batch of each rank as done. The samples that are left are dealt anew at the next ``reset``."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """The epoch, and the number of its samples that are done."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Returns to the result of ``state_dict``, with the ranks of now."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deals the samples that are left to the ranks of now."""
        self.num_replicas, self.rank = size(), rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)  # noqa: S311 - the same order on all ranks
        self.remaining_indices = order[self.processed_num :]
        self.num_samples: int = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        dealt = itertools.cycle(self.remaining_indices)
        return itertools.islice(dealt, self.rank, self.total_size, self.num_replicas)

    def __len__(self) -> int:
        return self.num_samples
