"""`LearningRate`: a schedule of `dl_comm.training` for Keras optimizers, which is saved with the model.

Thread rule: as Keras's optimizers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import keras

from dl_comm import training
from dl_comm._base.errors import ArgumentError
from dl_comm.keras._backend import on


@keras.saving.register_keras_serializable(package="dl_comm")
class LearningRate(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """A schedule as the `learning_rate` of an optimizer: `SGD(LearningRate(training.Cosine(0.1, steps)))`.

    To load a model with such an optimizer, import `dl_comm.keras` first.
    """

    def __init__(self, schedule: training.Schedule) -> None:
        """Store a schedule of `dl_comm.training`; other subclasses of `Schedule` work, but cannot be saved."""
        self.schedule = schedule

    def __call__(self, step: Any) -> Any:
        """Return the rate of a step, as a tensor of Keras's float type."""
        return on.rate(self.schedule, step, keras.config.floatx())

    def get_config(self) -> dict[str, Any]:
        """Return the config. Raises ArgumentError for a schedule that is not of `dl_comm.training`."""
        return _config(self.schedule)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> LearningRate:
        """Create the schedule from its config."""
        return cls(_schedule(config))


def _config(schedule: training.Schedule) -> dict[str, Any]:
    kind = type(schedule)
    if getattr(training, kind.__name__, None) is not kind or not dataclasses.is_dataclass(schedule):
        raise ArgumentError(f"a {kind.__name__} cannot be saved: use a schedule of dl_comm.training")
    values = {field.name: getattr(schedule, field.name) for field in dataclasses.fields(schedule)}
    return {"schedule": kind.__name__, **{name: _plain(value) for name, value in values.items()}}


def _plain(value: Any) -> Any:
    if isinstance(value, training.Schedule):
        return _config(value)
    return [float(entry) for entry in value] if hasattr(value, "__len__") else float(value)


def _schedule(config: dict[str, Any]) -> training.Schedule:
    values = {name: _schedule(value) if isinstance(value, dict) else value for name, value in config.items()}
    kind = values.pop("schedule")
    if kind not in training.__all__:
        raise ArgumentError(f"{kind!r} is not a schedule of dl_comm.training")
    made: training.Schedule = getattr(training, kind)(**values)
    return made
