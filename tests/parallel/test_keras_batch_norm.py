"""What only Keras has in batch normalization: channels last, masks, renorm, models, frozen layers, XLA."""

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
import frameworks  # noqa: E402
import test_batch_norm  # noqa: E402
from dl_comm._base.private_names import check  # noqa: E402


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    """Compute in float64: the order of additions then shows at 1e-15, and a wrong mean at 1e-2."""
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize(
    "options",
    [{}, {"masked": True}, {"renorm": True, "renorm_clipping": {"rmax": 3.0, "rmin": 0.3, "dmax": 5.0}}],
    ids=["image", "mask", "renorm"],
)
def test_channels_last(options: dict[str, Any], mode: str, rank: int, size: int) -> None:
    framework = frameworks.get("tensorflow")
    parts = [np.moveaxis(part, 1, -1) for part in test_batch_norm.batches(size, 2, [3, 5, 0], "float64", 100.0)]
    layers = test_batch_norm.KerasLayers(framework)
    test_batch_norm.check(framework, layers, mode, parts, rank, 1e-9, axis=-1, **options)


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
    check.cache_clear()
    with pytest.raises(mc.StateError, match="_moments"):
        dk.SyncBatchNormalization()


def test_the_layer_of_keras_is_not_synchronized(rank: int, size: int) -> None:
    """`docs/keras.md` says so: it knows only `tf.distribute`."""
    layer = keras.layers.BatchNormalization(synchronized=True, momentum=0.0)
    layer(np.full((2, 3), float(rank)), training=True)
    np.testing.assert_allclose(layer.moving_mean, np.full(3, float(rank)))
