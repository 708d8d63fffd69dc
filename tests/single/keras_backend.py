"""One rank of `test_keras_backends`: Keras 3 on the backend of KERAS_BACKEND; prints "all equal" at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest

import dl_comm
import dl_comm.keras as dk

ROWS, BATCH = 16, 4
dl_comm.init()
ON_JAX = keras.backend.backend() == "jax"
RANK, SIZE = dl_comm.rank(), dl_comm.size()
_random = np.random.default_rng(5)
X = _random.normal(size=(ROWS * SIZE, 4)).astype("float32")
Y = np.sin(X.sum(axis=1, keepdims=True))


def model_from(seed: int, norm: type[keras.layers.Layer] | None = None) -> keras.Model:
    keras.utils.set_random_seed(seed)
    between = [] if norm is None else [norm()]
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(6, "tanh"), *between, keras.layers.Dense(1, name=f"last_{seed}")]
    )


def joined(array: np.ndarray) -> np.ndarray:
    """The rows in an order in which a batch of all ranks is made of one batch of each."""
    parts = [array[rank::SIZE] for rank in range(SIZE)]
    return np.concatenate([part[i : i + BATCH] for i in range(0, ROWS, BATCH) for part in parts])


def fit(model: keras.Model, optimizer: object, own: bool, callbacks: tuple = (), **options: object) -> list[float]:
    model.compile(optimizer, loss="mse", metrics=["mae"], **options)
    x, y, batch = (X[RANK::SIZE], Y[RANK::SIZE], BATCH) if own else (joined(X), joined(Y), BATCH * SIZE)
    more = {"shuffle": False, "verbose": 0, "callbacks": list(callbacks), "validation_data": (x, y)}
    history = model.fit(x, y, batch_size=batch, epochs=3, **more).history
    return [*history["loss"], *history["val_mae"]]


def same(model: keras.Model, expected: keras.Model) -> None:
    for mine, other in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=2e-5)
    assert dl_comm.equal_on_all_ranks([np.asarray(weight) for weight in model.get_weights()])


def error_in(action: Callable[[], object]) -> BaseException | None:
    """The error of dl_comm that an action raises."""
    with pytest.raises(Exception) as raised:
        action()
    return dl_comm.error_of(raised.value)


OPTIMIZERS = {
    "schedule": lambda: keras.optimizers.SGD(dk.LearningRate(dl_comm.training.Cosine(0.1, 12)), momentum=0.9),
    "adamw": lambda: keras.optimizers.AdamW(0.01, epsilon=1e-3, weight_decay=0.1),
    "clipping": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.05),
    "accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2, clipnorm=0.05),
    "scaling": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), dynamic_growth_steps=2),
}
CALLBACKS = (dk.BroadcastCallback(), dk.MetricAverageCallback(), dk.StatsCallback())


def trains_as_one_process() -> None:
    for name, make in OPTIMIZERS.items():
        alone, together = model_from(0), model_from(RANK)
        expected = fit(alone, make(), False)
        found = fit(together, dk.DistributedOptimizer(make()), True, CALLBACKS)
        print(name)
        same(together, alone)
        np.testing.assert_allclose(found, expected, rtol=1e-4)


def has_no_further_variables() -> None:
    """The variables that it applies do not become the optimizer's own."""
    sizes = []
    for wrap in (lambda optimizer: optimizer, dk.DistributedOptimizer):
        model = model_from(0)
        fit(model, wrap(OPTIMIZERS["accumulation"]()), True, CALLBACKS[:1])
        sizes.append(len(model.optimizer.variables))
    assert sizes[0] == sizes[1]


def saves_and_loads(path: str) -> None:
    """The model is loaded with its optimizer, whose next steps average, too."""
    alone, together = model_from(0), model_from(RANK)
    fit(alone, keras.optimizers.Adam(0.01), False)
    fit(together, dk.DistributedOptimizer(keras.optimizers.Adam(0.01)), True, CALLBACKS)
    if RANK == 0:
        together.save(path)
    dl_comm.barrier()
    loaded = dk.load_model(path)
    for model, own in ((alone, False), (loaded, True)):
        fit(model, model.optimizer, own, CALLBACKS[:1] if own else ())
    same(loaded, alone)


def other_models_fail_together() -> None:
    """Ranks with different variables raise MismatchError, and the next fit trains."""
    if SIZE > 1:
        model = model_from(0, keras.layers.LayerNormalization if RANK == 0 else None)
        error = error_in(lambda: fit(model, dk.DistributedOptimizer("sgd"), True, CALLBACKS))
        assert isinstance(error, dl_comm.MismatchError), error


def normalizes_over_all_ranks() -> None:
    """On jax one line says what to use instead."""
    alone, together = model_from(0, keras.layers.BatchNormalization), model_from(RANK, dk.SyncBatchNormalization)
    optimizer = dk.DistributedOptimizer("sgd")
    if ON_JAX:
        assert "has no gradient on jax" in str(error_in(lambda: fit(together, optimizer, True, CALLBACKS)))
        return
    fit(alone, "sgd", False)
    fit(together, optimizer, True, CALLBACKS)
    same(together, alone)


def starts_without_the_callback() -> None:
    """The first update broadcasts; on jax one line says what to add."""
    model = model_from(RANK)
    optimizer = dk.DistributedOptimizer("sgd")
    if ON_JAX:
        assert "add dl_comm.keras.BroadcastCallback()" in str(error_in(lambda: fit(model, optimizer, True)))
        return
    fit(model, optimizer, True)
    assert dl_comm.equal_on_all_ranks([np.asarray(weight) for weight in model.get_weights()])


trains_as_one_process()
has_no_further_variables()
saves_and_loads(str(Path(sys.argv[1]) / "model.keras"))
other_models_fail_together()
normalizes_over_all_ranks()
starts_without_the_callback()
dl_comm.finalize()
print("all equal")
