"""Schedules and weighted averages of metrics with Keras on 1, 2 and 3 ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras", minversion="3.0")

import dl_comm as mc  # noqa: E402
import dl_comm.keras as dk  # noqa: E402
from dl_comm import training  # noqa: E402


def compiled(schedule: training.Schedule) -> keras.Model:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
    model.compile(dk.DistributedOptimizer(keras.optimizers.SGD(dk.LearningRate(schedule))), loss=lambda y, p: -p)
    return model


def test_the_module_shows_its_names_only() -> None:
    assert dir(dk) == sorted(dk.__all__)


def test_fit_follows_the_schedule(size: int) -> None:
    schedule = training.WarmUp(2, training.Piecewise([3], [training.scaled_lr(0.5), 0.25]), start=0.25)
    model = compiled(schedule)
    ones = np.ones((4, 1), np.float32)
    model.fit(ones, ones, batch_size=1, epochs=1, verbose=0, callbacks=[dk.BroadcastCallback()])
    done = 1 + sum(schedule(step) for step in range(4))
    assert model.get_weights()[0].item() == pytest.approx(done)
    assert float(model.optimizer.learning_rate) == pytest.approx(schedule(4))


def test_a_saved_model_goes_on_with_its_schedule(tmp_path: Path, size: int) -> None:
    schedule = training.WarmUp(3, training.Piecewise([5], [training.scaled_lr(0.1), 0.01]))
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(dk.DistributedOptimizer(keras.optimizers.Adam(dk.LearningRate(schedule))), loss="mse")
    model.optimizer.build(model.trainable_variables)
    path = mc.rank_path(tmp_path / "model.keras")
    model.save(path)
    for load in (dk.load_model, keras.models.load_model):
        assert load(path).optimizer._learning_rate.schedule == schedule


def test_a_schedule_of_ones_own_cannot_be_saved() -> None:
    class Halving(training.Schedule):
        def rate(self, step: object, ops: object) -> object:
            return 0.5**step  # type: ignore[operator]

    rate = dk.LearningRate(Halving())
    assert float(rate(3)) == 0.125
    with pytest.raises(mc.ArgumentError, match="Halving cannot be saved"):
        rate.get_config()
    with pytest.raises(mc.ArgumentError, match="not a schedule"):
        dk.LearningRate.from_config({"schedule": "Sine"})


def test_logs_are_weighted(rank: int, size: int) -> None:
    weights = [rank + 1 for rank in range(size)]
    expected = sum(weight * rank for rank, weight in enumerate(weights)) / sum(weights)
    assert dk.average_logs({"loss": rank, "flag": True}, rank + 1) == {"loss": pytest.approx(expected), "flag": True}
    logs = {"loss": float(rank)}
    dk.MetricAverageCallback(weight=rank + 1).on_epoch_end(0, logs)
    assert logs == {"loss": pytest.approx(expected)}
    assert dk.average_logs({"loss": float(rank)}) == {"loss": (size - 1) / 2}


def test_replicas_of_a_model_and_its_optimizer(rank: int, size: int) -> None:
    keras.layers.Dense(1)  # the numbers in names may differ between processes
    for _ in range(rank):
        keras.layers.Dense(1)
    training.seed_rank(3)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(dk.DistributedOptimizer(keras.optimizers.Adam(0.1)), loss="mse")
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0, callbacks=[dk.BroadcastCallback()])
    mc.check_replicas(model, model.optimizer, model.layers[0], model.get_weights())
    model.layers[1].bias.assign([1.0 + rank])
    if size > 1:
        with pytest.raises(mc.MismatchError, match=r"^1 of 1\d entries.*\n.*bias float\d\d\[1\] of rank\(s\) 1"):
            mc.check_replicas(model, model.optimizer)
