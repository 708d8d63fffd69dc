"""`SyncBatchNormalization` against `BatchNormalization` on the joined batch of 1, 2 and 3 ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras", minversion="3.0")

import dl_comm as mc  # noqa: E402
import dl_comm.keras as dk  # noqa: E402
import dl_comm.tensorflow as dt  # noqa: E402


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    """Compute in float64: the order of additions then shows at 1e-15, and a wrong mean at 1e-2."""
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


def rows_of(rank: int, size: int) -> int:
    """Batches of different lengths; the last of three ranks has none."""
    return 0 if rank == 2 else 3 + 2 * rank


def batches(size: int, shape: tuple[int, ...]) -> list[np.ndarray]:
    """The batches of all ranks, far from zero."""
    return [np.random.default_rng(rank).normal(100.0, 1 + rank, (rows_of(rank, size), *shape)) for rank in range(size)]


def train(layer: Any, x: Any, mask: Any, weights: Any, traced: bool) -> list[Any]:
    """Output, gradients of the input and of gamma and beta, and statistics after two steps."""
    layer.build(x.shape)
    layer.gamma.assign(np.arange(1.0, layer.gamma.shape[0] + 1))

    def step(x: Any, weights: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True, mask=mask)
            loss = tf.reduce_sum(weights * y**3)
        return y, tape.gradient(loss, [x, layer.gamma.value, layer.beta.value])

    run = tf.function(step, autograph=False) if traced else step
    run(tf.constant(x * 0.5), tf.constant(weights))
    y, (dx, dgamma, dbeta) = run(tf.constant(x), tf.constant(weights))
    return [y, dx, dgamma, dbeta, np.asarray(layer.moving_mean), np.asarray(layer.moving_variance)]


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize(
    ("shape", "options", "masked"),
    [
        ((4,), {}, False),
        ((5, 3), {"axis": 1, "momentum": 0.7}, False),
        ((2, 3, 1), {"epsilon": 0.1}, False),
        ((6, 4), {}, True),
        ((4,), {"renorm": True, "renorm_clipping": {"rmax": 3.0, "rmin": 0.3, "dmax": 5.0}}, False),
    ],
    ids=["rows", "axis", "image", "mask", "renorm"],
)
def test_training_equals_one_process_with_the_joined_batch(
    shape: tuple[int, ...], options: dict[str, Any], masked: bool, traced: bool, rank: int, size: int
) -> None:
    parts = batches(size, shape)
    joined = np.concatenate(parts)
    weights = np.random.default_rng(9).normal(size=joined.shape)
    mask = np.random.default_rng(8).random(joined.shape[:-1]) < 0.7 if masked else None
    start = sum(len(part) for part in parts[:rank])
    mine = slice(start, start + len(parts[rank]))
    alone = train(keras.layers.BatchNormalization(**options), joined, mask, weights, traced)
    own_mask = None if mask is None else mask[mine]
    together = train(dk.SyncBatchNormalization(**options), parts[rank], own_mask, weights[mine], traced)
    for found, expected in zip(together[:2], alone[:2], strict=True):
        np.testing.assert_allclose(found, expected[mine], rtol=1e-9, atol=1e-9)
    for found, expected in zip(dt.allreduce(together[2:4]), alone[2:4], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-9)
    for found, expected in zip(together[4:], alone[4:], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def model_with(layer: Any) -> Any:
    kernel = keras.initializers.GlorotNormal(1)
    layers = [keras.layers.Dense(6, kernel_initializer=kernel), layer, keras.layers.Dense(1, kernel_initializer=kernel)]
    return keras.Sequential([keras.Input((4,)), *layers])


def test_fit_and_a_saved_model(rank: int, size: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(2, 4 * size, 4)), rng.normal(size=(2, 4 * size, 1))
    alone, together = (
        model_with(keras.layers.BatchNormalization()),
        model_with(dk.SyncBatchNormalization(momentum=0.99)),
    )
    alone.compile(keras.optimizers.SGD(0.1), loss="mse")
    together.compile(dk.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    alone.fit(np.concatenate(x), np.concatenate(y), batch_size=4 * size, epochs=3, shuffle=False, verbose=0)
    own = np.concatenate(x[:, rank::size]), np.concatenate(y[:, rank::size])
    together.fit(*own, batch_size=4, epochs=3, shuffle=False, verbose=0)
    for found, expected in zip(together.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-12)
    assert mc.check_buffers_match([np.asarray(weight) for weight in together.weights], 0) == 0
    together.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    layer = loaded.layers[1]
    assert type(layer) is dk.SyncBatchNormalization
    assert layer.get_config() == together.layers[1].get_config()
    for _ in range(rank + 1):  # inference needs no other rank
        np.testing.assert_allclose(loaded.predict(x[0], verbose=0), alone.predict(x[0], verbose=0), rtol=1e-8)


def test_half_precision_and_a_frozen_layer(rank: int, size: int) -> None:
    layer = dk.SyncBatchNormalization(dtype="mixed_float16", momentum=0.0)
    x = np.full((2, 3), 2.0 * rank, np.float16)
    y = layer(x, training=True)
    assert y.dtype == tf.float16
    np.testing.assert_allclose(layer.moving_mean, np.full(3, size - 1.0), rtol=1e-6)
    layer.trainable = False
    for _ in range(rank):
        layer(x, training=True)
    np.testing.assert_allclose(layer.moving_mean, np.full(3, size - 1.0), rtol=1e-6)


def test_what_is_refused(rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = dk.SyncBatchNormalization()
    with pytest.raises(mc.StateError, match="XLA"):
        tf.function(lambda x: layer(x, training=True), jit_compile=True)(tf.ones([2, 3], tf.float64))
    monkeypatch.setattr(keras.layers.BatchNormalization, "call", lambda self, inputs: inputs)
    with pytest.raises(mc.StateError, match="_moments"):
        dk.SyncBatchNormalization()


def test_the_layer_of_keras_is_not_synchronized(rank: int, size: int) -> None:
    """`docs/keras.md` says so: it knows only `tf.distribute`."""
    layer = keras.layers.BatchNormalization(synchronized=True, momentum=0.0)
    layer(np.full((2, 3), float(rank)), training=True)
    np.testing.assert_allclose(layer.moving_mean, np.full(3, float(rank)))
