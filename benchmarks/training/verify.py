"""Verifies the results of the contenders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

JUDGED = 4
"""Steps after which parameters of two contenders must be close; later, rounding errors may grow."""
TOLERANCE = 1e-3
"""Their largest distance, relative to the distance from the initial parameters."""


class Verification:
    """The verification of a case; `problems` has error texts."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._agreed_after: dict[str, list[int]] = {}
        self._distances: dict[int, dict[str, float]] = {}

    def start(self, digests: Mapping[str, Sequence[str]]) -> None:
        """Checks that all ranks of all contenders have equal initial parameters; one digest for each rank."""
        if len({digest for found in digests.values() for digest in found}) > 1:
            self.problems.append(f"parameters differ before the first step: {dict(digests)}")

    def agreement(self, name: str, digests: Sequence[str], averages: bool, steps: int) -> None:
        """Checks after `steps` steps that ranks that average have equal parameters, and others do not."""
        different = len(set(digests))
        if different != (1 if averages else len(digests)):
            self.problems.append(f"{name} has {different} different models on {len(digests)} ranks after {steps} steps")
        elif averages:
            self._agreed_after.setdefault(name, []).append(steps)

    def distance(self, first: Path, one: Path, other: Path, steps: int) -> None:
        """Checks the distance of two contenders after `steps` steps. Files of float32; `first`: initial parameters."""
        found = distance(*(np.fromfile(path, np.float32) for path in (first, one, other)))
        self._distances.setdefault(steps, {})[f"{one.name}-{other.name}"] = found
        if steps <= JUDGED and not found <= TOLERANCE:
            self.problems.append(
                f"{one.name} and {other.name} have a relative distance of {found:.1e} after {steps} steps"
            )

    def report(self) -> dict[str, Any]:
        """For the JSON file: problems, steps with bit-identical ranks, distances by number of steps."""
        return {
            "problems": self.problems,
            "agreed_after": self._agreed_after,
            "distances": self._distances,
            "tolerance": TOLERANCE,
            "judged_until": JUDGED,
        }


def distance(first: np.ndarray, one: np.ndarray, other: np.ndarray) -> float:
    """The Euclidean distance of two models, relative to the distance from `first` to `one`.

    NaN if values are not finite; infinite if shapes differ or `one` equals `first`.
    """
    if not first.shape == one.shape == other.shape:
        return float("inf")
    length = float(np.linalg.norm(one - first))
    return float(np.linalg.norm(one - other)) / length if length else float("inf")
