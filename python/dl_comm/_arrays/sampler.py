"""The indices of the samples that a rank takes in an epoch, for data loaders. Imports no framework.

Thread rule: any thread may call everything, one at a time for each sampler.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Literal

import numpy as np

from dl_comm._base.checks import checked_flag, checked_int
from dl_comm._base.errors import ArgumentError
from dl_comm._job.ranks import get_nranks, get_rank

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

    To resume in the middle of an epoch, call ``advance`` after each step, and save the ``state_dict``::

        for inputs, targets in loader:
            train(inputs, targets)
            sampler.advance(len(inputs))
        state = sampler.state_dict()  # the same on all ranks

    After ``load_state_dict`` the next pass has the rest of that epoch, also on another number of ranks.

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
        self._start = 0  # the samples of all ranks that the current pass leaves out
        self._resumes = False  # whether the next pass does
        self._taken = 0  # by this rank, in the current pass
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
        epoch = checked_int("epoch", epoch, 0, _MAX)
        if epoch != self.epoch:
            self._start, self._resumes, self._taken = 0, False, 0
        self.epoch = epoch

    def advance(self, samples: int) -> None:
        """Counts samples that this rank has trained with, for ``state_dict``. Every rank counts the same.

        The sampler cannot know them itself: a data loader with workers asks for samples long before they are used.

        Raises:
            ArgumentError: ``samples`` is no integer, negative, or more than the rest of the epoch.
        """
        left = len(self) - self._taken
        self._taken += checked_int("samples", samples, 0, left)

    def state_dict(self) -> dict[str, int]:
        """The position in the data, as numbers: ``epoch``, ``taken``, ``length`` and ``seed``. The same on all ranks.

        ``taken``: the samples of the epoch that all ranks have taken, as ``advance`` has counted.
        """
        taken = min(self._start + self._taken * self.num_replicas, self._total())
        return {"epoch": self.epoch, "taken": taken, "length": self._length(), "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on where ``state_dict`` was called: the next pass has the samples of its epoch that are left.

        With another number of ranks, these have the same samples, in other batches.

        Raises:
            ArgumentError: The state is of another dataset or seed, or it is no state of a sampler. Nothing changes.
        """
        if not isinstance(state, Mapping) or set(state) != set(self.state_dict()):
            raise ArgumentError(f"invalid state: {state!r} (expected that of a DistributedSampler)")
        epoch, taken, length, seed = (checked_int(name, state[name], 0, _MAX) for name in self.state_dict())
        if (length, seed) != (self._length(), self.seed):
            raise ArgumentError(
                f"invalid state: of {length} samples with seed {seed} (this sampler has {self._length()}, with seed "
                f"{self.seed})"
            )
        self.epoch, self._start, self._resumes, self._taken = epoch, min(taken, length), True, 0

    def __len__(self) -> int:
        return len(range(self._start + self.rank, self._total(), self.num_replicas))

    def __iter__(self) -> Iterator[int]:
        if not self._resumes:
            self._start = 0
        self._resumes, self._taken = False, 0
        length = self._length()
        if self.shuffle:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(length)
        else:
            order = np.arange(length)
        # Repeats from the start as often as needed: a dataset may have fewer samples than there are ranks.
        whole = np.resize(order, self._total())
        mine: list[int] = whole[self._start + self.rank :: self.num_replicas].tolist()
        return iter(mine)

    def _length(self) -> int:
        if hasattr(self.dataset, "__len__"):
            return len(self.dataset)
        return checked_int("dataset", self.dataset, 0, _MAX)

    def _total(self) -> int:
        """The number of samples of all ranks, with those that the pass leaves out at its start."""
        length, ranks, start = self._length(), self.num_replicas, self._start
        if self.even is False:
            return length
        left = length - start
        return start + (left if self.even == "drop" else left + ranks - 1) // ranks * ranks
