"""Statistics of ``dl_comm.stats`` as curves over time, for TensorBoard and others."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from dl_comm._base.checks import checked_text
from dl_comm._base.errors import ArgumentError
from dl_comm._job.diagnosis import stats

Write = Callable[[str, float, int], None]


class StatsWriter:
    """Writes communication statistics of the last interval as curves.

    Args:
        writer: A ``torch.utils.tensorboard.SummaryWriter`` (or an object with ``add_scalar``), a writer of
            ``tf.summary.create_file_writer``, a function of (name, value, step), or None, to use ``read`` only.
        prefix: The prefix of the curves' names.

    The curves of this rank, over all teams that average gradients:

    - ``calls``: calls per second; ``mib``: MiB of tensors per second;
    - ``exposed``: the fraction of time that callers waited for communication; 0: fully hidden;
    - ``overlap``: the fraction of communication time in which no caller waited; 1: fully hidden;
    - ``waited``: the fraction of time that the teams' threads waited for late ranks.

    Local. Write on rank 0 only, or to one folder per rank. Thread rule: one thread at a time.
    """

    def __init__(self, writer: Any = None, prefix: str = "dl_comm") -> None:
        """Starts the first interval. Raises ArgumentError for an unsupported ``writer``, StateError before init."""
        self._write = _function(writer)
        checked_text("prefix", prefix)
        self._prefix = prefix
        self._since = time.monotonic()
        self._last_sums = _sums()

    def read(self) -> dict[str, float]:
        """Returns the values of the interval since the last call (or the start), by name; starts a new interval."""
        now, sums = time.monotonic(), _sums()
        seconds = max(now - self._since, 1e-9)
        change = {key: value - self._last_sums[key] for key, value in sums.items()}
        self._since, self._last_sums = now, sums
        comm_seconds = change["comm_s"]
        values = {
            "calls": change["calls"] / seconds,
            "mib": change["bytes"] / 2**20 / seconds,
            "exposed": change["exposed_s"] / seconds,
            "overlap": min(max(1 - change["exposed_s"] / comm_seconds, 0.0), 1.0) if comm_seconds > 0 else 0.0,
            "waited": (change["waited_s"] + change["network_s"]) / seconds,
        }
        return {f"{self._prefix}/{name}": value for name, value in values.items()}

    def write(self, step: int) -> dict[str, float]:
        """Writes the values of ``read`` for ``step``, and returns them."""
        values = self.read()
        for name, value in values.items():
            self._write(name, value, step)
        return values


def _sums() -> dict[str, float]:
    teams = [numbers for team, numbers in stats()["teams"].items() if team >= 0]
    keys = ("calls", "bytes", "comm_s", "exposed_s", "waited_s", "network_s")
    return {key: float(sum(numbers[key] for numbers in teams)) for key in keys}


def _function(writer: Any) -> Write:
    if writer is None:
        return lambda name, value, step: None
    if hasattr(writer, "add_scalar"):
        return lambda name, value, step: writer.add_scalar(name, value, step)
    if hasattr(writer, "as_default"):

        def write(name: str, value: float, step: int) -> None:
            import tensorflow as tf

            with writer.as_default():
                tf.summary.scalar(name, value, step=step)

        return write
    if callable(writer):
        return lambda name, value, step: writer(name, value, step)
    raise ArgumentError(f"invalid writer: a {type(writer).__name__} (expected add_scalar, as_default, or a function)")
