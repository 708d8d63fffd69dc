"""Which parameter goes into which bucket: found out in the first rounds, the same on all ranks.

The order is that in which the first backward of rank 0 has finished the gradients. The size of the buckets is the one
of a few with which the time from a backward's first gradient to its last, and what its end had to wait, was shortest:
each size has some rounds, of which the first does not count (its memory is new), and the median over the rounds of the
mean over the ranks decides. Smaller buckets, which are more calls, must be clearly faster.

What ranks must agree on is told in small averages of their own, behind those of a round's gradients: rank 0's order as
the mean of that times the number of ranks and of zeros.

Thread rule: that of the reducer, one thread at a time.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

import dl_comm
from dl_comm._buckets import split
from dl_comm.torch import _ops

Named = Sequence[tuple[str, torch.Tensor]]

# The sizes that are tried, in MiB; the first is what a model gets that needs no trial.
SIZES = (25.0, 8.0, 3.0, 1.0)
# Rounds of each size whose time counts.
ROUNDS_PER_SIZE = 4
# How much longer than the shortest time that of a larger size may be.
MAX_SLOWDOWN = 1.05


class BucketPlan:
    """How an reducer's parameters are dealt out to buckets, and the talk about it."""

    def __init__(self, bucket_bytes: int | None) -> None:
        """Make buckets of this size; None: of the size that turns out to be fastest."""
        self._sizes = [int(size * 2**20) for size in SIZES] if bucket_bytes is None else [bucket_bytes]
        self._size = self._sizes[0]
        self._trials: list[int] = []  # the sizes that are yet to be tried, the present one first
        self._times: dict[int, list[float]] = {}  # the seconds of the rounds of each
        self._finish_order: Any = WeakTensorKeyDictionary()  # where a parameter came in the first backward
        self._plan: list[torch.Tensor] = []  # the parameters, bucket by bucket
        self._order_known = True  # their order is the one that was agreed on
        self._ready_order: dict[int, None] = {}  # places in the plan, as gradients came in this round
        self._call: int | None = None
        self._exchanged = torch.empty(0)
        self._last_seconds: float | None = None  # the seconds of the round before, if it counts
        self._warmed_up = False  # the buckets have had a round

    @property
    def bucket_bytes(self) -> int:
        """The size of the buckets now, in bytes; the first has 1 MiB at most."""
        return self._size

    def assign(self, named: Named) -> list[Named]:
        """Deal out parameters, given in the order of registration; to be called in the same rounds on all ranks."""
        reversed_parameters = list(named)[::-1]
        self._order_known = all(parameter in self._finish_order for _, parameter in reversed_parameters)
        if self._order_known:
            reversed_parameters.sort(key=lambda pair: self._finish_order[pair[1]])
        splits: dict[tuple[int, ...], int] = {}
        # What a step takes on a GPU the host does not see: no trials.
        sizes = (
            self._sizes
            if all(parameter.device.type == "cpu" for _, parameter in reversed_parameters)
            else self._sizes[:1]
        )
        for size in sizes:
            splits.setdefault(tuple(len(part) for part in _cut(reversed_parameters, size)), size)
        if all(len(lengths) < 2 for lengths in splits):
            self._order_known = True  # there is nothing to find out
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
        """Take note that the gradient of parameter number `index` of the plan is ready."""
        if not self._order_known:
            self._ready_order.setdefault(index)

    def start_exchange(self, team: int, name: str, owner: int) -> None:
        """Start to tell the other ranks what this rank has found, if there is anything left to find out."""
        if self._call is not None or (self._order_known and not self._trials) or _ops.may_return_early(team, owner):
            return
        if self._order_known:
            label = "(how long the step before took)"
            self._exchanged = torch.tensor(
                [self._last_seconds or 0.0, float(self._last_seconds is not None)], dtype=torch.float64
            )
        else:
            label = "(in which order backward has finished the gradients)"
            indices = [*self._ready_order, *(i for i in range(len(self._plan)) if i not in self._ready_order)]
            weight = dl_comm.get_nranks() if dl_comm.get_rank() == 0 else 0
            self._exchanged = torch.tensor(indices, dtype=torch.float64) * weight
        self._call = _ops.start_control(self._exchanged, team, f"{name}.bucket_plan", label, owner)

    def finish_exchange(self) -> bool:
        """Wait for what the ranks have told, and tell whether the parameters are to be dealt out anew."""
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
        """Do not wait for what the others tell."""
        call, self._call = self._call, None
        if call is not None:
            _ops.detach_control(call)
            self._last_seconds = None

    def record_time(self, seconds: float) -> None:
        """Take note of the time of a round: from its first gradient to its last, and what was waited."""
        self._last_seconds = seconds if self._warmed_up else None
        self._warmed_up = True
        self._ready_order.clear()


def _cut(named: Named, size: int) -> list[Named]:
    """Cut parameters into buckets of about `size` bytes, each of one device; the order within a device stays."""
    return [part for pairs in group_by_device(named) for part in split(pairs, _num_bytes, size)]


def group_by_device(named: Named) -> list[Named]:
    """Tell parameters apart by the device that they are on, in the order in which the devices come first."""
    devices = dict.fromkeys(parameter.device for _, parameter in named)
    return [[pair for pair in named if pair[1].device == device] for device in devices]


def _num_bytes(pair: tuple[str, torch.Tensor]) -> int:
    _, parameter = pair
    return parameter.numel() * parameter.element_size()
