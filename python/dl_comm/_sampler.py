"""The indices of the samples that a rank takes in an epoch, for data loaders. Imports no framework.

Thread rule: any thread may call everything, one at a time for each sampler.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Literal

import numpy as np

from dl_comm._checks import checked_flag, checked_int
from dl_comm._errors import ArgumentError
from dl_comm._ranks import get_nranks, get_rank

_MAX = 2**62


class DistributedSampler:
    """The indices of the samples of this rank, in another order in each epoch, for ``DataLoader(sampler=)`` of torch.

    As ``torch.utils.data.DistributedSampler``, without ``torch.distributed``::

        sampler = dl_comm.training.DistributedSampler(dataset)
        loader = torch.utils.data.DataLoader(dataset, batch_size=32, sampler=sampler)
        for epoch in range(90):
            sampler.set_epoch(epoch)

    All ranks shuffle the whole by the seed and the epoch, and take the samples in turn: rank 1 of 4 those at positions
    1, 5, 9, ... So no communication is needed, but the ranks must have the same arguments and version of NumPy.

    Args:
        dataset: Anything with a length, or the number of samples.
        num_replicas: The number of ranks; None: all ranks of the job, read when first needed.
        rank: The rank; None: this one, read when first needed.
        shuffle: Whether to shuffle; False: the order of the dataset.
        seed: Of the orders of all epochs; the same on all ranks.
        drop_last: With True, the last samples are left out so that all ranks get the same number; as ``even="drop"``.
        even: True: all ranks get the same number, and samples from the start are repeated if needed. ``"drop"``: the
            same number, and up to ``num_replicas`` - 1 samples are left out, others in each epoch. False: each sample
            exactly once, and numbers differ by at most one: end an epoch with ``dl_comm.join()``.

    Raises:
        ArgumentError: An argument is invalid, or ``rank`` is not below ``num_replicas``.
    """

    def __init__(
        self,
        dataset: Sized | int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        even: bool | Literal["drop"] = True,
    ) -> None:
        self.dataset = dataset
        self.shuffle = checked_flag("shuffle", shuffle)
        self.seed = checked_int("seed", seed, 0, _MAX)
        self.epoch = 0
        self.even = even if isinstance(even, str) and even == "drop" else checked_flag("even", even)
        self._num_replicas = None if num_replicas is None else checked_int("num_replicas", num_replicas, 1)
        self._rank = None if rank is None else checked_int("rank", rank, 0, (self._num_replicas or 2**31) - 1)
        if checked_flag("drop_last", drop_last):
            if self.even is False:
                raise ArgumentError("drop_last=True leaves samples out, and even=False takes each one: choose one")
            self.even = "drop"
        self._length()

    @property
    def num_replicas(self) -> int:
        """The number of ranks; calls ``dl_comm.init_mpi`` if needed."""
        if self._num_replicas is None:
            self._num_replicas = get_nranks()
        return self._num_replicas

    @property
    def rank(self) -> int:
        """The rank; calls ``dl_comm.init_mpi`` if needed."""
        if self._rank is None:
            self._rank = get_rank()
        return checked_int("rank", self._rank, 0, self.num_replicas - 1)

    @property
    def drop_last(self) -> bool:
        """Whether samples are left out so that all ranks get the same number."""
        return self.even == "drop"

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, from 0, of which the next iterator has the order. Without it every epoch has the same one.

        Raises:
            ArgumentError: ``epoch`` is no integer, or negative.
        """
        self.epoch = checked_int("epoch", epoch, 0, _MAX)

    def __len__(self) -> int:
        return len(range(self.rank, self._total(), self.num_replicas))

    def __iter__(self) -> Iterator[int]:
        length = self._length()
        if self.shuffle:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(length)
        else:
            order = np.arange(length)
        # Repeats from the start as often as needed: a dataset may have fewer samples than there are ranks.
        whole = np.resize(order, self._total())
        mine: list[int] = whole[self.rank :: self.num_replicas].tolist()
        return iter(mine)

    def _length(self) -> int:
        if hasattr(self.dataset, "__len__"):
            return len(self.dataset)
        return checked_int("dataset", self.dataset, 0, _MAX)

    def _total(self) -> int:
        """The number of samples of all ranks."""
        length, ranks = self._length(), self.num_replicas
        if self.even is False:
            return length
        return (length if self.even == "drop" else length + ranks - 1) // ranks * ranks
