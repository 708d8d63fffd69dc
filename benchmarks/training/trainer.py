"""What a process does with a model, whatever the framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np

SEED = 7
"""All processes make the parameters from it, and rank r its data from SEED + 1 + r."""
BATCHES = 8
"""A rank's batches, which its steps take in trial."""
LEARNING_RATE = 0.01
MOMENTUM = 0.9


class Trainer(ABC):
    """A model in training in one process of a contender: it joins its job when it is made. One thread uses it."""

    rank: int

    @abstractmethod
    def step(self) -> None:
        """One step, with the next batch. Collective where the contender communicates."""

    @abstractmethod
    def reported(self) -> tuple[float, float]:
        """Seconds of the last step as the contender itself tells them: exposed, and busy. NaN: it does not tell."""

    @abstractmethod
    def loss(self) -> float:
        """The loss of the last step, on this rank's batch."""

    @abstractmethod
    def parameters(self) -> Iterator[np.ndarray]:
        """What is trained, in an order that all contenders of a framework have: float32."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the job. Collective."""
