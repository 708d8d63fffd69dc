"""Assignment of parameters to buckets: measured in the first rounds, the same on all ranks.

The order is the one in which the first backward of rank 0 finished the gradients. The bucket size is chosen from a few
candidates by time: from the first gradient of backward to the last, plus the exposed time. Each candidate gets some
rounds; the first does not count, because its memory is new. The median over rounds of the mean over ranks decides.
Smaller buckets need more calls, so they must be clearly faster.

Ranks exchange these values with small allreduces after each round's gradients. To send its order, rank 0 contributes
the order times the number of ranks, the other ranks zeros.

Thread rule: as the reducer, one thread at a time.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from dl_comm._base.buckets import split
from dl_comm._job.ranks import get_nranks, get_rank
from dl_comm.torch import _ops

Named = Sequence[tuple[str, torch.Tensor]]

# Candidate sizes in MiB; the first one is the default without trials.
SIZES = (25.0, 8.0, 3.0, 1.0)
# Timed rounds per candidate, without the first one.
ROUNDS_PER_SIZE = 4
# The largest size wins whose time is at most this factor above the shortest.
MAX_SLOWDOWN = 1.05


class BucketPlan:
    """Assigns a reducer's parameters to buckets, and exchanges measurements with the other ranks."""

    def __init__(self, bucket_bytes: int | None) -> None:
        """Plan buckets of this size; None: find the fastest size by trials."""
        self._sizes = [int(size * 2**20) for size in SIZES] if bucket_bytes is None else [bucket_bytes]
        self._call: int | None = None
        self.restart()

    def restart(self) -> None:
        """Forget all measurements, between rounds. All ranks must call it in the same rounds."""
        self._size = self._sizes[0]
        self._trials: list[int] = []  # sizes left to try, the current one first
        self._times: dict[int, list[float]] = {}  # seconds of each size's rounds
        self._finish_order: Any = WeakTensorKeyDictionary()  # a parameter's position in the first backward
        self._plan: list[torch.Tensor] = []  # the parameters, bucket by bucket
        self._order_known = True  # all ranks have agreed on the order of `_plan`
        self._ready_order: dict[int, None] = {}  # indices into the plan, in the order of this round's gradients
        self._exchanged = torch.empty(0)
        self._last_seconds: float | None = None  # time of the previous round, if it counts
        self._warmed_up = False  # these buckets have completed a round

    @property
    def bucket_bytes(self) -> int:
        """The current bucket size in bytes; the first bucket has at most 1 MiB."""
        return self._size

    def assign(self, named: Named) -> list[Named]:
        """Assign parameters, given in registration order, to buckets. All ranks must call it in the same rounds."""
        reversed_parameters = list(named)[::-1]
        self._order_known = all(parameter in self._finish_order for _, parameter in reversed_parameters)
        if self._order_known:
            reversed_parameters.sort(key=lambda pair: self._finish_order[pair[1]])
        splits: dict[tuple[int, ...], int] = {}
        # The host cannot time a step on a GPU: no trials.
        sizes = (
            self._sizes
            if all(parameter.device.type == "cpu" for _, parameter in reversed_parameters)
            else self._sizes[:1]
        )
        for size in sizes:
            splits.setdefault(tuple(len(part) for part in _cut(reversed_parameters, size)), size)
        if all(len(lengths) < 2 for lengths in splits):
            self._order_known = True  # one bucket at most: the order does not matter
        elif self._order_known and not self._times and len(splits) > 1:
            self._trials = list(splits.values())
            self._size = self._trials[0]
            self._times = {size: [] for size in self._trials}
        parts = _cut(reversed_parameters, self._size)
        self._plan = [parameter for part in parts for _, parameter in part]
        self._ready_order.clear()
        self._last_seconds, self._warmed_up = None, False
        return parts

    def gradient_ready(self, index: int) -> None:
        """Record that the gradient of parameter number `index` of the plan is ready."""
        if not self._order_known:
            self._ready_order.setdefault(index)

    def start_exchange(self, team: int, name: str, owner: int) -> None:
        """Start to exchange this rank's measurements, unless the plan is final."""
        if self._call is not None or (self._order_known and not self._trials) or _ops.may_return_early(team, owner):
            return
        if self._order_known:
            label = "(time of the previous step)"
            self._exchanged = torch.tensor(
                [self._last_seconds or 0.0, float(self._last_seconds is not None)], dtype=torch.float64
            )
        else:
            label = "(order in which backward finished the gradients)"
            indices = [*self._ready_order, *(i for i in range(len(self._plan)) if i not in self._ready_order)]
            weight = get_nranks() if get_rank() == 0 else 0
            self._exchanged = torch.tensor(indices, dtype=torch.float64) * weight
        self._call = _ops.start_control(self._exchanged, team, f"{name}.bucket_plan", label, owner)

    def finish_exchange(self) -> bool:
        """Wait for the exchange; return whether the parameters must be assigned again."""
        call, self._call = self._call, None
        if call is None:
            return False
        _ops.wait_control(call)
        if not self._order_known:
            order = [round(value) for value in self._exchanged.tolist()]
            for position, i in enumerate(order):
                self._finish_order[self._plan[i]] = position
            return True
        seconds, counts = self._exchanged.tolist()
        if counts < 1.0:
            return False
        times = self._times[self._trials[0]]
        times.append(seconds)
        if len(times) < ROUNDS_PER_SIZE:
            return False
        self._trials.pop(0)
        if self._trials:
            self._size = self._trials[0]
        else:
            medians = {size: statistics.median(times) for size, times in self._times.items()}
            limit = MAX_SLOWDOWN * min(medians.values())
            self._size = next(size for size, median in medians.items() if median <= limit)
        return True

    def detach_exchange(self) -> None:
        """Give up waiting for the exchange."""
        call, self._call = self._call, None
        if call is not None:
            _ops.detach_control(call)
            self._last_seconds = None

    def record_time(self, seconds: float) -> None:
        """Record the time of a round: from its first gradient to its last, plus the exposed time."""
        self._last_seconds = seconds if self._warmed_up else None
        self._warmed_up = True
        self._ready_order.clear()


def _cut(named: Named, size: int) -> list[Named]:
    """Split parameters into buckets of about `size` bytes, one device each; keeps the order within a device."""
    return [part for pairs in group_by_device(named) for part in split(pairs, _num_bytes, size)]


def group_by_device(named: Named) -> list[Named]:
    """Group parameters by device, in the order of each device's first parameter."""
    devices = dict.fromkeys(parameter.device for _, parameter in named)
    return [[pair for pair in named if pair[1].device == device] for device in devices]


def _num_bytes(pair: tuple[str, torch.Tensor]) -> int:
    _, parameter = pair
    return parameter.numel() * parameter.element_size()
