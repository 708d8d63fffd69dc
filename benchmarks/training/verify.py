"""Whether contenders have computed what they should."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

JUDGED = 4
"""Steps after which two contenders' parameters must be about the same; later on rounding errors may have grown."""
TOLERANCE = 1e-3
"""The most that they may differ then, as a share of the way from the first parameters."""


class Verification:
    """What has been found in a case: `problems` are sentences, none when all is right."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._agreed_after: dict[str, list[int]] = {}
        self._distances: dict[int, dict[str, float]] = {}

    def start(self, digests: Mapping[str, Sequence[str]]) -> None:
        """Before the first step all ranks of all contenders have the same parameters; digests are a rank's each."""
        if len({digest for found in digests.values() for digest in found}) > 1:
            self.problems.append(f"parameters differ before the first step: {dict(digests)}")

    def agreement(self, name: str, digests: Sequence[str], averages: bool, steps: int) -> None:
        """After so many steps ranks that average have the same parameters, and others have not."""
        different = len(set(digests))
        if different != (1 if averages else len(digests)):
            self.problems.append(f"{name} has {different} different models on {len(digests)} ranks after {steps} steps")
        elif averages:
            self._agreed_after.setdefault(name, []).append(steps)

    def distance(self, first: Path, one: Path, other: Path, steps: int) -> None:
        """How far two contenders are apart after so many steps; files hold float32, `first` what they started with."""
        found = distance(*(np.fromfile(path, np.float32) for path in (first, one, other)))
        self._distances.setdefault(steps, {})[f"{one.name}-{other.name}"] = found
        if steps <= JUDGED and not found <= TOLERANCE:
            self.problems.append(
                f"{one.name} and {other.name} are {found:.1e} of their way from the start apart after {steps} steps"
            )

    def report(self) -> dict[str, Any]:
        """For the JSON file: problems, steps after which ranks agreed bit for bit, distances after so many steps."""
        return {
            "problems": self.problems,
            "agreed_after": self._agreed_after,
            "distances": self._distances,
            "tolerance": TOLERANCE,
            "judged_until": JUDGED,
        }


def distance(first: np.ndarray, one: np.ndarray, other: np.ndarray) -> float:
    """How far two models are apart, as a share of the way from the first one to `one`, in Euclidean norms.

    NaN when they are not finite; infinite when they have other shapes, or `one` is the first one.
    """
    if not first.shape == one.shape == other.shape:
        return float("inf")
    way = float(np.linalg.norm(one - first))
    return float(np.linalg.norm(one - other)) / way if way else float("inf")
