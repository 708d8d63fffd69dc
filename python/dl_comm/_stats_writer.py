"""The numbers of ``dl_comm.stats`` as curves: what changed since the last look, for TensorBoard and the like."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from dl_comm._diagnosis import stats
from dl_comm._errors import ArgumentError

Write = Callable[[str, float, int], None]


class StatsWriter:
    """Writes what dl_comm did since the last time, as a few curves.

    Args:
        writer: Where they go: a ``torch.utils.tensorboard.SummaryWriter`` (or what has its ``add_scalar``), a writer of
            ``tf.summary.create_file_writer``, a function of (name, value, step), or None, for ``read`` alone.
        prefix: What the names of the curves start with.

    The curves, over all teams that average gradients, of this rank:

    - ``calls``: averages a second; ``mib``: MiB of tensors averaged, a second;
    - ``exposed``: the share of the time in which callers waited for communication; 0 is hidden altogether;
    - ``overlap``: the share of the averages' time in which no caller waited; 1 is hidden altogether;
    - ``waited``: the share of the time in which the teams' threads waited for other ranks, which are late then.

    Local. Write on rank 0 only, or give each rank a folder of its own. Thread rule: one thread at a time.
    """

    def __init__(self, writer: Any = None, prefix: str = "dl_comm") -> None:
        """Starts the first interval. Raises ArgumentError when ``writer`` is none of those, StateError before init."""
        self._write = _function(writer)
        self._prefix = prefix
        self._since = time.monotonic()
        self._last_sums = _sums()

    def read(self) -> dict[str, float]:
        """The curves' values, by name, since the last time (or the start), whose interval ends with this call."""
        now, sums = time.monotonic(), _sums()
        seconds = max(now - self._since, 1e-9)
        change = {key: value - self._last_sums[key] for key, value in sums.items()}
        self._since, self._last_sums = now, sums
        comm_seconds = change["busy_s"]
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
    keys = ("calls", "bytes", "busy_s", "exposed_s", "waited_s", "network_s")
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
    raise ArgumentError(f"writer is a {type(writer).__name__}; it has add_scalar or as_default, or is a function")
