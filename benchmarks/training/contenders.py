"""The contenders of a model: one row each, with its trainer and a function that starts it."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from benchmarks.common import contenders
from benchmarks.common.contenders import Contender, Start
from benchmarks.common.processes import Launch
from benchmarks.common.tools import Tools, package
from benchmarks.training.models import Model

NAMES = ("one", "independent", "ours", "ddp")
"""All contenders' names."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "KERAS_BACKEND": "tensorflow",
    "DL_COMM_DUMP_DIR": "none",
}
"""The environment of all processes."""


@dataclass(frozen=True)
class Training(Contender):
    """A contender of this benchmark; its group is "base", "ours" or "peer".

    Attributes:
        alone: Whether it is a single process for any number of ranks.
    """

    alone: bool = False

    @property
    def averages(self) -> bool:
        """Whether it communicates."""
        return self.group != "base"

    def processes(self, ranks: int) -> int:
        """One, or the number of ranks."""
        return 1 if self.alone else ranks


def of(model: Model) -> list[Training]:
    """The contenders of this model."""
    plain = _unlaunched(model)
    found = [
        Training("one", "base", "single process", plain, alone=True),
        Training("independent", "base", "independent processes", plain),
        Training("ours", "ours", "dl_comm", _ours(model)),
    ]
    if model.framework == "torch":
        found.append(Training("ddp", "peer", "torch DDP, gloo", _ddp(model)))
    return found


def _command(model: Model, trainer: str) -> list[str]:
    package(model.framework)
    return [sys.executable, "-m", "benchmarks.training.worker", model.name, trainer]


def _unlaunched(model: Model) -> Start:
    def start(_: Tools, ranks: int) -> Launch:
        return contenders.unlaunched(ranks, _command(model, "plain"), ENVIRONMENT)

    return start


def _ours(model: Model) -> Start:
    def start(tools: Tools, ranks: int) -> Launch:
        package("dl_comm")
        return contenders.mpich(tools, ranks, _command(model, "ours"), ENVIRONMENT)

    return start


def _ddp(model: Model) -> Start:
    def start(_: Tools, ranks: int) -> Launch:
        return contenders.gloo(ranks, _command(model, "ddp"), ENVIRONMENT)

    return start
