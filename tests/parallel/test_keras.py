"""Keras 3 on TensorFlow on 1, 2 and 3 ranks: model.fit, the optimizer wrapper and the callbacks."""

from __future__ import annotations

import functools

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras", minversion="3.0")

import dl_comm as mc  # noqa: E402
import dl_comm.keras as dk  # noqa: E402

pytestmark = pytest.mark.costly

ROWS = 16


@pytest.fixture(autouse=True)
def in_float64():
    """Compute in float64: the order of additions then shows at 1e-15, and a wrong average at 1e-2."""
    keras.backend.clear_session()
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


def samples(size: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    return rng.normal(size=(ROWS * size, 4)), rng.normal(size=(ROWS * size, 1))


def model_from(seed: int, deferred: bool = False):
    """A small model with a normalisation-free body, whose weights follow from `seed`."""
    layers = [
        keras.layers.Dense(6, "tanh", kernel_initializer=keras.initializers.GlorotNormal(seed)),
        keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotNormal(seed + 1)),
    ]
    return keras.Sequential(layers if deferred else [keras.Input((4,)), *layers])


def same_everywhere(model) -> bool:
    weights = list(model.weights) + list(model.optimizer.variables)
    return mc.check_buffers_match([np.asarray(weight) for weight in weights], 0) == 0


def fit(model, optimizer, x, y, batch, callbacks=(), epochs=3, **options):
    model.compile(optimizer, loss="mse", metrics=["mae"], **options)
    return model.fit(x, y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))


def interleave(array: np.ndarray, size: int, batch: int) -> np.ndarray:
    """Order rows so that a batch of `batch * size` is made of one batch of each rank's shard."""
    shards = [array[rank::size] for rank in range(size)]
    return np.concatenate([shard[i : i + batch] for i in range(0, ROWS, batch) for shard in shards])


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5), momentum=0.9),
    "adamw": lambda: keras.optimizers.AdamW(0.01, epsilon=1e-3, weight_decay=0.1, use_ema=True),
    "clipping": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.05),
    "scaling": lambda: keras.optimizers.SGD(0.1, loss_scale_factor=64.0, clipvalue=0.01),
    "dynamic scaling": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), dynamic_growth_steps=2),
    "accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2, clipnorm=0.05),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fit_equals_one_rank_with_the_whole_batch(rank, size, name):
    x, y = samples(size)
    alone = model_from(0)
    fit(alone, OPTIMIZERS[name](), interleave(x, size, 4), interleave(y, size, 4), 4 * size)
    together = model_from(10 * rank)
    optimizer = dk.DistributedOptimizer(OPTIMIZERS[name]())
    fit(together, optimizer, x[rank::size], y[rank::size], 4, [dk.BroadcastCallback()])
    for mine, expected in zip(together.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-7, atol=1e-10)
    assert same_everywhere(together)


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_a_model_without_variables_is_built_before_the_broadcast(rank, size, eager):
    x, y = samples(size)
    alone = model_from(0)
    fit(alone, "sgd", interleave(x, size, 4), interleave(y, size, 4), 4 * size, epochs=1)
    together = model_from(10 * rank, deferred=True)
    optimizer = dk.DistributedOptimizer("sgd")
    callbacks = [dk.BroadcastCallback()]
    fit(together, optimizer, x[rank::size], y[rank::size], 4, callbacks, epochs=1, run_eagerly=eager)
    for mine, expected in zip(together.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-7, atol=1e-10)
    assert same_everywhere(together)


def test_state_that_is_not_trained_and_seeds(rank, size):
    x, y = samples(size)
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((4,)), layers.BatchNormalization(), layers.Dropout(0.5, seed=rank), layers.Dense(1)]
    )
    model.layers[0].moving_mean.assign(np.full(4, rank + 1.0))
    optimizer = dk.DistributedOptimizer(keras.optimizers.Adam(0.1 * (rank + 1)))
    fit(model, optimizer, x[:0], y[:0], 4, epochs=0)
    callback = dk.BroadcastCallback(root=size - 1)
    callback.set_model(model)
    callback.on_train_begin()
    np.testing.assert_array_equal(np.asarray(model.layers[0].moving_mean), np.full(4, float(size)))
    assert float(optimizer.learning_rate) == pytest.approx(0.1 * size)
    assert same_everywhere(model)
    assert int(np.asarray(model.layers[1].seed_generator.state)[0]) == rank


def test_validation_metrics_and_callbacks_that_decide(rank, size):
    x, y = samples(size)
    model = model_from(rank)
    stop = keras.callbacks.EarlyStopping(monitor="val_mae", patience=0, baseline=-1.0, restore_best_weights=True)
    slower = keras.callbacks.ReduceLROnPlateau(monitor="val_loss", patience=0, factor=0.5, min_delta=1e9)
    optimizer = dk.DistributedOptimizer(keras.optimizers.SGD(0.01))
    model.compile(optimizer, loss="mse", metrics=["mae"])
    history = model.fit(
        x[rank::size],
        y[rank::size],
        validation_data=(x[rank::size] + rank, y[rank::size]),
        epochs=3,
        verbose=0,
        callbacks=[dk.BroadcastCallback(), dk.MetricAverageCallback(), slower, stop],
    ).history
    assert set(history) == {"loss", "mae", "val_loss", "val_mae", "learning_rate"}
    for values in history.values():
        assert mc.check_buffers_match([np.asarray(values)], 0) == 0
    assert same_everywhere(model)


def test_the_history_has_the_numbers_of_dl_comm():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(dk.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    ones, written = np.ones((8, 1), np.float32), []
    stats = dk.StatsCallback(lambda name, value, step: written.append((name, step)))
    callbacks = [dk.BroadcastCallback(), dk.MetricAverageCallback(), stats]
    history = model.fit(ones, ones, batch_size=2, epochs=2, verbose=0, callbacks=callbacks).history
    assert len(history["dl_comm/exposed"]) == 2
    assert all(value > 0 for value in history["dl_comm/calls"])
    assert all(0 <= value <= 1 for value in history["dl_comm/overlap"])
    assert {step for name, step in written if name == "dl_comm/mib"} == {0, 1}


def test_average_logs(rank, size):
    logs = {"b": float(rank), "a": np.float32(2 * rank), "c": tf.constant(rank), "word": "kept", "none": None}
    means = dk.average_logs(logs)
    assert means == {"b": (size - 1) / 2, "a": size - 1.0, "c": (size - 1) / 2, "word": "kept", "none": None}
    assert dk.average_logs({}) == {}


def test_logs_that_differ_fail_everywhere_and_the_next_ones_work(rank, size):
    if size == 1:
        pytest.skip("needs two ranks")
    with pytest.raises(mc.MismatchError, match="only_0"):
        dk.average_logs({"loss": 1.0, f"only_{rank}": 2.0})
    assert dk.average_logs({"loss": float(rank)}) == {"loss": (size - 1) / 2}


def test_sparse_gradients_and_variables_without_one(rank, size):
    embedding = tf.Variable(np.ones((size + 1, 2)))
    unused = tf.Variable(np.ones(3))
    optimizer = dk.DistributedOptimizer(keras.optimizers.SGD(1.0))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(embedding, [rank]))
        optimizer.apply_gradients(zip(tape.gradient(loss, [embedding, unused]), [embedding, unused], strict=True))

    with pytest.warns(UserWarning, match="Gradients do not exist"):
        step()
    expected = np.ones((size + 1, 2))
    expected[:size] -= 1.0 / size
    np.testing.assert_allclose(embedding.numpy(), expected)
    np.testing.assert_array_equal(unused.numpy(), np.ones(3))


def test_wrapping_keeps_state_and_configuration(rank, size):
    x, y = samples(1)
    model = model_from(0)
    plain = keras.optimizers.Adam(0.125, beta_1=0.5, weight_decay=0.25)
    plain.exclude_from_weight_decay(var_names=["bias"])
    fit(model, plain, x, y, 4, epochs=1)
    config = plain.get_config()
    state = [np.asarray(variable) for variable in plain.variables]
    wrapped = dk.DistributedOptimizer(plain)
    assert wrapped is plain
    assert isinstance(wrapped, keras.optimizers.Adam)
    assert wrapped.get_config() == config
    assert int(wrapped.iterations) == ROWS // 4
    for mine, expected in zip(wrapped.variables, state, strict=True):
        np.testing.assert_array_equal(np.asarray(mine), expected)
    assert [wrapped._use_weight_decay(v) for v in model.trainable_variables] == [True, False, True, False]


def test_a_saved_model_loads_plain_and_distributed(rank, size, tmp_path):
    x, y = samples(size)
    model = model_from(rank)
    optimizer = dk.DistributedOptimizer(keras.optimizers.Adam(0.01))
    fit(model, optimizer, x[rank::size], y[rank::size], 4, [dk.BroadcastCallback()])
    path = str(tmp_path / "model.keras")
    model.save(path)
    plain = keras.models.load_model(path)
    assert type(plain.optimizer) is keras.optimizers.Adam
    distributed = dk.load_model(path)
    assert type(distributed.optimizer) is not keras.optimizers.Adam
    for loaded in (plain, distributed):
        assert int(loaded.optimizer.iterations) == int(optimizer.iterations)
        for mine, expected in zip(loaded.optimizer.variables, optimizer.variables, strict=True):
            np.testing.assert_array_equal(np.asarray(mine), np.asarray(expected))
    for again in (model, distributed):
        again.fit(x[rank::size], y[rank::size], batch_size=4, epochs=2, shuffle=False, verbose=0)
    for mine, expected in zip(distributed.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-12)
    assert same_everywhere(distributed)


class Halving(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule that cannot be saved: it has no get_config."""

    def __call__(self, step):
        return 0.1 / (1.0 + tf.cast(step, tf.float64))


class WithArgument(keras.optimizers.SGD):
    """An optimizer that its configuration is not enough for."""

    def __init__(self, extra, **options):
        super().__init__(**options)
        self.extra = extra


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.SGD(Halving()),
        lambda: keras.optimizers.SGD(lambda: 0.1),
        lambda: WithArgument(3, learning_rate=0.1),
    ],
    ids=["schedule", "lambda", "subclass"],
)
def test_optimizers_that_cannot_be_made_of_their_configuration(rank, size, make):
    x, y = samples(size)
    alone = model_from(0)
    fit(alone, make(), interleave(x, size, 4), interleave(y, size, 4), 4 * size)
    together = model_from(rank)
    fit(together, dk.DistributedOptimizer(make()), x[rank::size], y[rank::size], 4, [dk.BroadcastCallback()])
    for mine, expected in zip(together.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-7, atol=1e-10)
    assert same_everywhere(together)


def test_an_optimizer_that_is_wrapped_after_the_first_fit(rank, size):
    x, y = samples(size)
    model = model_from(rank)
    optimizer = keras.optimizers.SGD(0.1)
    fit(model, optimizer, x[rank::size], y[rank::size], 4, epochs=1)
    dk.DistributedOptimizer(optimizer)
    model.fit(x[rank::size], y[rank::size], batch_size=4, epochs=1, verbose=0, callbacks=[dk.BroadcastCallback()])
    assert same_everywhere(model)


class HeadInTheStep(keras.Model):
    """A model with a layer that only its training step uses."""

    def __init__(self):
        super().__init__()
        self.body = keras.layers.Dense(5)
        self.head = keras.layers.Dense(1)

    def call(self, inputs):
        return self.body(inputs)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.head(self(x, training=True)) - y) ** 2)
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        return {"loss": loss}


class LayerInTraining(keras.Model):
    """A model with a layer that only training calls."""

    def __init__(self):
        super().__init__()
        self.body = keras.layers.Dense(5)
        self.noise = keras.layers.Dense(5)
        self.head = keras.layers.Dense(1)

    def call(self, inputs, training=None):
        hidden = self.body(inputs)
        return self.head(self.noise(hidden) if training else hidden)


@pytest.mark.parametrize("model_class", [HeadInTheStep, LayerInTraining])
def test_models_whose_variables_come_with_the_first_training_step(rank, size, model_class):
    x, y = samples(size)
    model = model_class()
    model.compile(dk.DistributedOptimizer("adam"), loss="mse")  # no metrics: a training step of one's own skips them
    model.fit(x[rank::size], y[rank::size], batch_size=4, verbose=0, callbacks=[dk.BroadcastCallback()])
    assert len(model.weights) >= 4
    assert same_everywhere(model)


def test_optimizer_state_that_only_the_root_has(rank, size):
    x, y = samples(size)
    model = model_from(rank)
    model.compile(dk.DistributedOptimizer("adam"), loss="mse")
    if rank == 0:
        model.optimizer.build(model.trainable_variables)
        model.optimizer.iterations.assign(7)
    callbacks = [dk.BroadcastCallback()]
    model.fit(x[rank::size], y[rank::size], batch_size=ROWS, epochs=1, verbose=0, callbacks=callbacks)
    assert int(model.optimizer.iterations) == 8
    assert same_everywhere(model)


def test_one_rank_with_gradients_that_are_not_finite_makes_all_skip(rank, size):
    x, y = samples(size)
    model = model_from(0)
    optimizer = dk.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
    mine = x[rank::size].copy()
    if rank == size - 1:
        mine[0, 0] = np.nan
    before = model.get_weights()
    fit(model, optimizer, mine, y[rank::size], ROWS, epochs=1)
    for after, weight in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(after, weight)
    assert float(optimizer.dynamic_scale) == 2.0**14
    assert same_everywhere(model)


def test_what_is_refused(rank, size):
    wrapped = dk.DistributedOptimizer("adam")
    with pytest.raises(mc.ArgumentError, match="already"):
        dk.DistributedOptimizer(wrapped)
    with pytest.raises(mc.DTypeError, match="optimizer"):
        dk.DistributedOptimizer(3)
    with pytest.raises(mc.ArgumentError, match="no_such_optimizer"):
        dk.DistributedOptimizer("no_such_optimizer")
    with pytest.raises(mc.ArgumentError, match="team -1 is out of range"):
        dk.DistributedOptimizer("adam", team=-1)
    with pytest.raises(mc.ArgumentError, match="inside a LossScaleOptimizer"):
        keras.optimizers.LossScaleOptimizer(wrapped)


def test_mixed_precision_is_refused_by_compile_or_works(rank, size):
    x, y = samples(size)
    x, y = x[rank::size].astype(np.float32), y[rank::size]
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        with pytest.raises(mc.ArgumentError, match=r"^a DistributedOptimizer cannot be inside .* use [^\n]*$"):
            model.compile(dk.DistributedOptimizer("adam"), loss="mse")
        optimizer = dk.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
        x[0, 0] = np.inf if rank == 0 else x[0, 0]  # one rank's gradients are not finite in one of the steps
        fit(model, optimizer, x, y, 4, epochs=2)
        assert model.optimizer is optimizer
        assert float(optimizer.dynamic_scale) <= 2.0**13  # float16 itself overflows once
        assert same_everywhere(model)
    finally:
        keras.config.set_dtype_policy(before)


@pytest.mark.parametrize(
    ("name", "callback"),
    [
        pytest.param(name, callback, marks=[pytest.mark.heavy] if name not in ("adamw", once) else [])
        for callback, once in ((False, "dynamic scaling"), (True, "adamw"))
        for name in OPTIMIZERS
    ],
)
def test_fit_starts_from_rank_0_by_itself(rank, size, name, callback):
    x, y = samples(size)
    alone = model_from(0)
    fit(alone, OPTIMIZERS[name](), interleave(x, size, 4), interleave(y, size, 4), 4 * size)
    together = model_from(10 * rank)
    callbacks = [dk.BroadcastCallback()] if callback else []
    fit(together, dk.DistributedOptimizer(OPTIMIZERS[name]()), x[rank::size], y[rank::size], 4, callbacks)
    for mine, expected in zip(together.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-7, atol=1e-10)
    assert same_everywhere(together)


@pytest.mark.parametrize("traced", [True, False])
def test_a_loop_starts_from_rank_0_by_itself(rank, size, traced):
    for broadcast in (True, False):
        weight = keras.Variable([float(rank)])
        optimizer = dk.DistributedOptimizer(keras.optimizers.SGD(1.0), broadcast=broadcast)
        step = functools.partial(optimizer.apply, [tf.constant([1.0 + rank])], [weight])
        for count in range(1, 3):
            (tf.function(step) if traced and count == 1 else step)()
            start = 0 if broadcast else rank
            np.testing.assert_allclose(weight.numpy(), [start - count * (size + 1) / 2])


def test_an_optimizer_made_again_from_its_config(rank, size):
    wrapped = dk.DistributedOptimizer(keras.optimizers.SGD(0.25, momentum=0.5))
    again = type(wrapped).from_config(wrapped.get_config())
    assert type(again) is type(wrapped)
    assert again.get_config() == wrapped.get_config()
    assert 0 != again._dl_comm_owner != wrapped._dl_comm_owner
    weight = keras.Variable([float(rank)])
    again.apply([tf.constant([1.0 + rank])], [weight])
    np.testing.assert_allclose(weight.numpy(), [-0.25 * (size + 1) / 2])
    with pytest.raises(mc.ArgumentError, match="inside a LossScaleOptimizer"):
        keras.optimizers.LossScaleOptimizer(again)
    scaled = dk.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.25)))
    assert type(type(scaled).from_config(scaled.get_config())) is type(scaled)


def test_xla_is_refused_and_the_callback_switches_it_off(rank, size):
    x, y = samples(size)
    x, y = x[rank::size], y[rank::size]
    with pytest.raises(mc.StateError, match="XLA"):
        fit(model_from(0), dk.DistributedOptimizer("sgd"), x, y, 4, jit_compile=True)
    model = model_from(rank)
    fit(model, dk.DistributedOptimizer("sgd"), x, y, 4, [dk.BroadcastCallback()], jit_compile=True)
    assert not model.jit_compile
    assert same_everywhere(model)
