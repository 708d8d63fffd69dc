"""Optimizers in graphs average a bucket at a time: in Keras, TF1 sessions and schedules; the same bits as at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

import keras  # noqa: E402

import dl_comm as mc  # noqa: E402
import dl_comm.keras as dk  # noqa: E402
import dl_comm.tensorflow as dt  # noqa: E402

pytestmark = pytest.mark.costly

ALL_AT_ONCE, ONE_EACH = "1000", "0.000001"
STEPS = 4
TEAM = 40


def calls(team: int) -> int:
    return int(mc.stats()["teams"][team]["calls"]) if team in mc.stats()["teams"] else 0


OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "clipping": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.05),
    "accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_keras(monkeypatch: pytest.MonkeyPatch, rank: int, name: str) -> None:
    x = np.random.default_rng(rank).normal(size=(8 * STEPS, 3)).astype(np.float32)

    def train(bucket_mb: str, eagerly: bool = False) -> tuple[list[np.ndarray], int]:
        monkeypatch.setenv("DL_COMM_BUCKET_MB", bucket_mb)
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.layers.Dense(width, activation="tanh") for width in (5, 4, 2)])
        model.build((None, 3))
        optimizer = dk.DistributedOptimizer(OPTIMIZERS[name](), team=TEAM)
        model.compile(optimizer, loss="mse", run_eagerly=eagerly, jit_compile=False)
        before = calls(TEAM)
        model.fit(x, x[:, :2], batch_size=8, epochs=1, shuffle=False, verbose=0)
        return model.get_weights(), calls(TEAM) - before

    together, once = train(ALL_AT_ONCE)
    apart, each = train(ONE_EACH)
    # Three kernels and three biases.
    assert each == 6 * once > 0
    for one, other in zip(together, apart, strict=True):
        np.testing.assert_array_equal(one, other)
    assert mc.check_buffers_match(apart, 0) == 0
    _, eager = train(ONE_EACH, eagerly=True)
    assert eager == once


def test_a_bucket_that_is_full_at_a_mebibyte_and_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DL_COMM_BUCKET_MB", "2")
    variables = [tf.Variable(tf.ones([size])) for size in (100, 1 << 19, 1 << 19, 300_000, 10, 20)]
    optimizer = dk.DistributedOptimizer(keras.optimizers.SGD(1.0), team=TEAM)

    @tf.function(jit_compile=False)
    def step() -> None:
        optimizer.apply([tf.ones_like(variable) for variable in variables], variables)

    step()
    graph = step.get_concrete_function().graph
    sizes = [len(op.inputs) for op in graph.get_operations() if op.type == "DlCommGradients"]
    # From the last variable on: 1 MiB is reached with the fourth, then 2 MiB with each of the long ones.
    assert sizes == [3, 1, 1, 1]
    assert all(float(tf.reduce_max(tf.abs(variable))) == 0.0 for variable in variables)


@pytest.mark.parametrize("bucket_mb", [ALL_AT_ONCE, ONE_EACH])
def test_a_session(monkeypatch: pytest.MonkeyPatch, rank: int, size: int, bucket_mb: str) -> None:
    monkeypatch.setenv("DL_COMM_BUCKET_MB", bucket_mb)
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        variables = [v1.get_variable(f"v{i}", initializer=np.zeros(i + 1), dtype=tf.float64) for i in range(5)]
        table = v1.get_variable("table", initializer=np.zeros((4, 2)), dtype=tf.float64)
        unused = v1.get_variable("unused", initializer=0.0)
        rows = tf.nn.embedding_lookup(table, [rank % 4])
        loss = tf.add_n([(i + 1.0 + rank) * tf.reduce_sum(v) for i, v in enumerate(variables)]) + tf.reduce_sum(rows)
        optimizer = dt.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), team=TEAM)
        train = optimizer.minimize(loss, var_list=[*variables, table, unused])
        session.run(v1.global_variables_initializer())
        for _ in range(STEPS):
            session.run(train)
        values = session.run([*variables, table])
    for i, value in enumerate(values[:5]):
        np.testing.assert_allclose(value, -STEPS * (i + 1.0 + (size - 1) / 2), rtol=1e-14)
    expected = np.zeros((4, 2))
    for other in range(size):
        expected[other % 4] -= STEPS / size
    np.testing.assert_allclose(values[5], expected, rtol=1e-14)


def test_a_schedule_counts_steps_and_applies_every_mean_once(
    monkeypatch: pytest.MonkeyPatch, rank: int, size: int
) -> None:
    monkeypatch.setenv("DL_COMM_BUCKET_MB", ONE_EACH)
    steps = 8
    weights = [tf.Variable(tf.zeros([2])) for _ in range(3)]
    optimizer: Any = dk.DistributedOptimizer(keras.optimizers.SGD(1.0), team=TEAM + 1, nstep=steps, warmup=0.25, verb=0)

    @tf.function(jit_compile=False)
    def step(value: Any) -> None:
        optimizer.apply([tf.fill([2], value * (i + 1)) for i in range(3)], weights)

    for number in range(steps):
        step(tf.constant(2.0**number + rank))
    total = sum(2.0**number + (size - 1) / 2 for number in range(steps))
    assert [weight.numpy().tolist() for weight in weights] == [[-total * (i + 1)] * 2 for i in range(3)]
