"""Steps, epochs, samples, seeds and learning rates for data-parallel training. No communication.

A schedule returns the learning rate of a step, counted from 0: an optional `WarmUp`, then a decay:

    steps = training.steps_per_epoch(ntrain, batch_size)
    rate = training.scaled_lr(0.1)
    rate = training.WarmUp(5 * steps, training.Cosine(rate, 90 * steps))
    rate(0)  # 0.1, for any number of ranks

The steps of a decay count from the start of training, with or without a warm-up. For the schedule types of the
frameworks see ``dl_comm.torch.lr_scheduler``, ``dl_comm.tensorflow.learning_rate`` and ``dl_comm.keras.LearningRate``.
``nranks=None`` means all ranks of the job, and requires ``dl_comm.init_mpi()`` or ``init()`` first.

Thread rule: any thread may call everything; schedules are immutable.
"""

from __future__ import annotations

import abc
import dataclasses
import math
import random
import sys
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from dl_comm._arrays.sampler import DistributedSampler
from dl_comm._base.checks import checked_float, checked_int
from dl_comm._base.errors import ArgumentError
from dl_comm._job.ranks import get_nranks, get_rank

__all__ = [
    "Constant",
    "Cosine",
    "DistributedSampler",
    "Exponential",
    "Piecewise",
    "Polynomial",
    "Schedule",
    "WarmUp",
    "epoch_of",
    "max_steps",
    "scaled_lr",
    "seed_rank",
    "shard",
    "steps_per_epoch",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def max_steps(ntrain: int, batch_size: int, nepochs: float, nranks: int | None = None) -> int:
    """The total number of steps: nepochs * ntrain / (nranks * batch_size), rounded up.

    Args:
        ntrain: Samples in the training set, over all ranks.
        batch_size: Samples per rank and step.
        nepochs: Passes over the training set.
        nranks: The number of ranks; None: all ranks of the job.

    Raises:
        ArgumentError: A number is not positive.
    """
    steps = _positive("nepochs", nepochs) * _positive("ntrain", ntrain) / _global_batch(batch_size, nranks)
    if math.isinf(steps):
        raise ArgumentError(f"invalid nepochs: {nepochs!r} (the number of steps is infinite)")
    return math.ceil(steps)


def steps_per_epoch(ntrain: int, batch_size: int, nranks: int | None = None) -> int:
    """The number of steps of one epoch over all ranks, rounded up. As ``max_steps`` with ``nepochs`` = 1."""
    return max_steps(ntrain, batch_size, 1, nranks)


def epoch_of(step: float, ntrain: int, batch_size: int, nranks: int | None = None) -> float:
    """The number of epochs after ``step`` steps of all ranks; 2.5 is in the third epoch.

    Arguments and errors as in ``max_steps``.
    """
    return checked_float("step", step) * _global_batch(batch_size, nranks) / _positive("ntrain", ntrain)


def shard(n: int, rank: int | None = None, nranks: int | None = None, *, even: Literal[False, "drop"] = False) -> range:
    """The indices of the samples of one rank: parts of nearly equal length, in the order of the ranks.

        part = training.shard(len(x), even="drop")
        x = x[part.start : part.stop]  # as many rows as on every other rank

    Nothing is padded, dropped or repeated, so it suits evaluation: ``Subset(dataset, shard(len(dataset)))`` in torch,
    ``dataset.skip(part.start).take(len(part))`` in tf.data, ``x[part.start : part.stop]`` for arrays. Parts differ by
    at most one sample. ``dl_comm.all_gather(predictions, ragged=True)`` gives the predictions in the order of the data;
    ``dl_comm.average_metrics(metrics, weight=len(part))`` the exact metrics. For training, `DistributedSampler`
    shuffles.

    Args:
        n: The number of samples.
        rank: The rank; None: this one.
        nranks: The number of ranks; None: all ranks of the job.
        even: ``"drop"``: parts of equal length, as training needs; the last ``n % nranks`` samples are left out.

    Raises:
        ArgumentError: ``n`` is negative, ``rank`` is not below ``nranks``, or ``even`` is neither False nor ``"drop"``.
    """
    nranks, n = _ranks(nranks), checked_int("n", n, 0, 2**62)
    rank = get_rank() if rank is None else checked_int("rank", rank, 0, nranks - 1)
    if isinstance(even, str) and even == "drop":
        return range(rank * (n // nranks), (rank + 1) * (n // nranks))
    if even is not False:
        raise ArgumentError(f"invalid even: {even!r} (expected False or 'drop')")
    return range(rank * n // nranks, (rank + 1) * n // nranks)


def seed_rank(seed: int, rank: int | None = None) -> int:
    """Seeds the random generators of this rank, for dropout and augmentation that differ between ranks.

        seed = training.seed_rank(0)
        generator = np.random.default_rng(seed)  # one of your own

    Those of Python's ``random``, of ``numpy.random``, and of torch, TensorFlow and Keras, as far as these are imported.
    Not for the order of samples, which all ranks must have in common: `DistributedSampler` has a seed of its own.

    Args:
        seed: The same on all ranks.
        rank: The rank; None: this one.

    Returns:
        The seed of the rank, below 2**32: the same in every run, another on each rank.

    Raises:
        ArgumentError: ``seed`` or ``rank`` is no integer, or negative.
    """
    number = get_rank() if rank is None else checked_int("rank", rank, 0)
    (own,) = np.random.SeedSequence([checked_int("seed", seed, 0, 2**62), number]).generate_state(1).tolist()
    random.seed(own)
    np.random.seed(own)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(own)
    if (tensorflow := sys.modules.get("tensorflow")) is not None:
        tensorflow.random.set_seed(own)
    if (keras := sys.modules.get("keras")) is not None:
        keras.utils.set_random_seed(own)
    return int(own)


def scaled_lr(lr: float, nranks: int | None = None, rule: str = "linear") -> float:
    """Scales the learning rate of one rank to the batch of all ranks.

    Args:
        lr: The rate for one rank.
        nranks: The number of ranks; None: all ranks of the job.
        rule: ``"linear"``: lr * nranks, for use with a warm-up (Goyal et al. 2017, "Accurate, Large Minibatch SGD",
            arXiv:1706.02677). ``"sqrt"``: lr * sqrt(nranks), which keeps the variance of an update (Krizhevsky 2014,
            "One weird trick for parallelizing convolutional neural networks", arXiv:1404.5997).

    Raises:
        ArgumentError: The rule does not exist, or ``nranks`` is not positive.
    """
    nranks, lr = _ranks(nranks), checked_float("lr", lr)
    factors = {"linear": nranks, "sqrt": math.sqrt(nranks)}
    if not isinstance(rule, str) or rule not in factors:
        raise ArgumentError(f"invalid rule: {rule!r} (expected 'linear' or 'sqrt')")
    return lr * factors[rule]


class Schedule(abc.ABC):
    """A learning rate that depends on the step: ``schedule(step)``, with steps from 0.

    To write another schedule, define ``rate``. It works in every framework if it uses only operators and ``ops``.
    """

    def __call__(self, step: float) -> float:
        """The rate of a step; after the end of the schedule, the final rate."""
        return float(self.rate(np.float64(step), np))

    @abc.abstractmethod
    def rate(self, step: Any, ops: Any) -> Any:
        """Computes the rate with ``ops``.

        Args:
            step: A float64 value or tensor of ``ops``.
            ops: ``numpy`` or ``tensorflow``; use only functions that both have (``where``, ``minimum``, ``cos``).
        """


@dataclasses.dataclass(frozen=True)
class Constant(Schedule):
    """The same rate in every step."""

    lr: float

    def __post_init__(self) -> None:
        """Check the number."""
        _check_numbers(self)

    def rate(self, step: Any, ops: Any) -> Any:
        """See ``Schedule``."""
        return 0.0 * step + self.lr


@dataclasses.dataclass(frozen=True)
class Piecewise(Schedule):
    """A piecewise constant rate: ``rates[0]`` before ``boundaries[0]``, ``rates[1]`` from there on, and so on.

    Raises ArgumentError unless the boundaries increase and ``rates`` has one entry more.
    """

    boundaries: Sequence[float]
    rates: Sequence[float]

    def __post_init__(self) -> None:
        """Check the boundaries and the number of rates."""
        for name in ("boundaries", "rates"):
            listed = getattr(self, name)
            if isinstance(listed, str) or not isinstance(listed, (Sequence, np.ndarray)):
                raise ArgumentError(f"invalid {name}: {listed!r} (expected a list of numbers)")
            for number in listed:
                checked_float(name, number)
        if len(self.rates) != len(self.boundaries) + 1:
            raise ArgumentError(
                f"{len(self.boundaries)} boundaries need {len(self.boundaries) + 1} rates, not {len(self.rates)}"
            )
        if any(late <= early for early, late in zip(self.boundaries, self.boundaries[1:], strict=False)):
            raise ArgumentError(f"the boundaries {list(self.boundaries)} do not increase")

    def rate(self, step: Any, ops: Any) -> Any:
        """See ``Schedule``."""
        result = 0.0 * step + self.rates[0]
        for boundary, rate in zip(self.boundaries, self.rates[1:], strict=True):
            result = ops.where(step >= boundary, 0.0 * step + rate, result)
        return result


@dataclasses.dataclass(frozen=True)
class Polynomial(Schedule):
    """From ``lr`` to ``end`` over ``steps`` steps, as (1 - step / steps) ** power; power 1 is linear."""

    lr: float
    steps: float
    end: float = 0.0
    power: float = 1.0

    def __post_init__(self) -> None:
        """Check that the number of steps is positive."""
        _check_numbers(self)
        _positive("steps", self.steps)

    def rate(self, step: Any, ops: Any) -> Any:
        """See ``Schedule``."""
        left = 1.0 - ops.minimum(step / self.steps, 0.0 * step + 1.0)
        return self.end + (self.lr - self.end) * left**self.power


@dataclasses.dataclass(frozen=True)
class Cosine(Schedule):
    """From ``lr`` to ``end`` over ``steps`` steps, as half a cosine wave (Loshchilov, Hutter 2017, SGDR)."""

    lr: float
    steps: float
    end: float = 0.0

    def __post_init__(self) -> None:
        """Check that the number of steps is positive."""
        _check_numbers(self)
        _positive("steps", self.steps)

    def rate(self, step: Any, ops: Any) -> Any:
        """See ``Schedule``."""
        done = ops.minimum(step / self.steps, 0.0 * step + 1.0)
        return self.end + (self.lr - self.end) * 0.5 * (1.0 + ops.cos(math.pi * done))


@dataclasses.dataclass(frozen=True)
class Exponential(Schedule):
    """``lr`` * ``factor`` ** (step / ``steps``), without an end."""

    lr: float
    steps: float
    factor: float

    def __post_init__(self) -> None:
        """Check that steps and factor are positive."""
        _check_numbers(self)
        _positive("steps", self.steps)
        _positive("factor", self.factor)

    def rate(self, step: Any, ops: Any) -> Any:
        """See ``Schedule``."""
        return self.lr * self.factor ** (step / self.steps)


@dataclasses.dataclass(frozen=True)
class WarmUp(Schedule):
    """Linear warm-up from ``start`` to the rate of ``then`` after ``steps`` steps, followed by ``then``.

    The gradual warm-up of Goyal et al. 2017 (arXiv:1706.02677): over some epochs from the rate of one rank to that of
    all. ``start`` None: the rate of ``then`` at step ``steps`` divided by the number of ranks. 0 steps: no warm-up.

    Raises ArgumentError for a negative number of steps.
    """

    steps: float
    then: Schedule
    start: float | None = None

    def __post_init__(self) -> None:
        """Compute the start once: later calls must not depend on the job."""
        if not checked_float("steps", self.steps) >= 0:
            raise ArgumentError(f"invalid steps: {self.steps!r} (expected >= 0)")
        if not isinstance(self.then, Schedule):
            raise ArgumentError(f"invalid then: {self.then!r} (expected a schedule)")
        if self.start is not None:
            checked_float("start", self.start)
        else:
            object.__setattr__(self, "start", self.then(self.steps) / _ranks(None))

    def rate(self, step: Any, ops: Any) -> Any:
        """See ``Schedule``."""
        if self.steps == 0:
            return self.then.rate(step, ops)
        assert self.start is not None  # since __post_init__
        start, peak = self.start, self.then(self.steps)
        return ops.where(step < self.steps, start + (peak - start) * (step / self.steps), self.then.rate(step, ops))


def _global_batch(batch_size: int, nranks: int | None) -> float:
    return _ranks(nranks) * _positive("batch_size", batch_size)


def _ranks(nranks: int | None) -> int:
    return get_nranks() if nranks is None else checked_int("nranks", nranks, 1)


def _positive(name: str, value: float) -> float:
    """The number as it is: integers stay exact."""
    if not checked_float(name, value) > 0:
        raise ArgumentError(f"invalid {name}: {value!r} (expected > 0)")
    return value


def _check_numbers(schedule: Schedule) -> None:
    for field in dataclasses.fields(schedule):  # type: ignore[arg-type]
        checked_float(field.name, getattr(schedule, field.name))
