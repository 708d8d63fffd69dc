"""The interface of a model in training, for any framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np

SEED = 7
"""Seed of the parameters on all processes; the data of rank r uses SEED + 1 + r."""
BATCHES = 8
"""The number of batches of a rank, used in turn by its steps."""
LEARNING_RATE = 0.01
MOMENTUM = 0.9


class Trainer(ABC):
    """A model in training in one process of a contender; the constructor joins its job. Not thread-safe."""

    rank: int

    @abstractmethod
    def step(self) -> None:
        """One step, with the next batch. Collective where the contender communicates."""

    @abstractmethod
    def reported(self) -> tuple[float, float]:
        """Exposed and total communication seconds of the last step, as reported by the contender; NaN: unknown."""

    @abstractmethod
    def loss(self) -> float:
        """The loss of the last step, on this rank's batch."""

    @abstractmethod
    def parameters(self) -> Iterator[np.ndarray]:
        """The trained parameters as float32, in the same order for all contenders of a framework."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the job. Collective."""
