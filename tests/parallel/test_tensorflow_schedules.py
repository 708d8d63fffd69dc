"""What only TensorFlow has in schedules: variables and feeds of sessions, functions, the optimizers of Keras."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

import keras  # noqa: E402

import dl_comm as mc  # noqa: E402
import dl_comm.keras as dk  # noqa: E402
import dl_comm.tensorflow as dt  # noqa: E402

TEAM = 30


@pytest.mark.parametrize("resource", [True, False], ids=["resource", "reference"])
def test_a_session_with_variables(resource: bool, rank: int, size: int) -> None:
    """The gradients are read from the memory of variables that the same step changes."""
    tf1 = tf.compat.v1
    team = TEAM + 4 + resource
    count = 300_000  # so that the average is still under way when the variable changes
    with tf.Graph().as_default():
        start = tf1.constant_initializer(1.0 + rank)
        value = tf1.get_variable("value", [count], initializer=start, use_resource=resource)
        (mean,) = mc.gradients([value], team)
        with tf.control_dependencies([mean]):
            grow = tf1.assign(value, value * 2.0).op
        mc.config_team(team, 0, 1, 7)
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            means = [session.run([mean, grow])[0] for _ in range(7)]
    assert [np.ptp(mean) for mean in means] == [0] * 7
    got = [float(mean[0]) for mean in means]
    m = [2.0**index * (1 + (size - 1) / 2) for index in range(7)]
    assert got == [m[0], m[1], 0.0, m[2], m[3], m[4], m[5] + m[6]]


def test_keras_applies_every_mean_once(rank: int, size: int) -> None:
    steps = 8
    model = keras.Sequential(
        [keras.layers.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )
    optimizer = dk.DistributedOptimizer(keras.optimizers.SGD(1.0), team=TEAM + 3, nstep=steps, warmup=0.25, verb=0)
    # The loss is the output, so that the gradient is the input.
    model.compile(optimizer=optimizer, loss=lambda _, prediction: keras.ops.mean(prediction))
    x = (2.0 ** np.arange(steps, dtype=np.float32) + rank)[:, None]
    model.fit(x, x, batch_size=1, epochs=1, shuffle=False, verbose=0)
    total = float(sum(2.0**step + (size - 1) / 2 for step in range(steps)))
    assert float(model.get_weights()[0][0, 0]) == -total


def trained(variable: Any, optimizer: Any, gradient: float, steps: int) -> float:
    """Steps with the same gradient; returns how far the variable went."""

    @tf.function
    def step() -> None:
        optimizer.apply([tf.fill([2], gradient)], [variable])

    start = float(variable[0])
    for _ in range(steps):
        step()
    return float(variable[0]) - start


def test_optimizers_of_one_team_keep_their_own_means(rank: int, size: int) -> None:
    """Equal shapes, one name, one team: in turn, and one after another that has stopped early."""
    a, b = tf.Variable(tf.zeros([2])), tf.Variable(tf.zeros([2]))
    optimizers = [dk.DistributedOptimizer(keras.optimizers.SGD(1.0), team=TEAM + 3) for _ in range(2)]
    mc.config_team(TEAM + 3, 0, 0, 20)
    for _ in range(10):
        trained(a, optimizers[0], 1.0, 1)
        trained(b, optimizers[1], -1000.0, 1)
    assert [float(a[0]), float(b[0])] == [-10.0, 10000.0]

    early = dk.DistributedOptimizer(keras.optimizers.SGD(1.0), team=TEAM + 3, nstep=20, warmup=0.0, verb=0)
    assert trained(a, early, 1000.0, 5) == -4000.0  # the last one is left
    later = dk.DistributedOptimizer(keras.optimizers.SGD(1.0), team=TEAM + 3, nstep=5, warmup=0.0, verb=0)
    assert trained(b, later, 1.0, 5) == -5.0
    inner = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0))
    with pytest.raises(ValueError, match="LossScaleOptimizer"):
        dk.DistributedOptimizer(inner, team=TEAM + 3, nstep=20)


def test_functions_keep_their_own_means(rank: int, size: int) -> None:
    @tf.function
    def generator(x: Any) -> Any:
        return mc.gradients([x], TEAM + 6)[0]

    @tf.function
    def critic(x: Any) -> Any:
        return mc.gradients([x], TEAM + 6)[0]

    mc.config_team(TEAM + 6, 0, 0, 8)
    got = [float(function(tf.constant(2.0**i))) for i in range(4) for function in (generator, critic)]
    assert got == [1.0, 1.0, 0.0, 0.0, 2.0, 2.0, 12.0, 12.0]


def test_what_a_session_was_fed_with_may_change(rank: int, size: int) -> None:
    """TensorFlow takes aligned arrays without a copy; the script refills its own while the average is under way."""
    raw = np.zeros(300_016, np.float32)
    offset = (-raw.ctypes.data % 64) // 4
    array = raw[offset : offset + 300_000]
    mc.config_team(TEAM + 7, 0, 0, 100)
    with tf.Graph().as_default():
        fed = tf.compat.v1.placeholder(tf.float32, [300_000])
        (mean,) = mc.gradients([fed], TEAM + 7)
        got = []
        with tf.compat.v1.Session() as session:
            for index in range(5):
                array[:] = index + 1
                value = session.run(mean, {fed: array})
                array[:] = 1000
                got.append((value.min(), value.max()))
    assert got == [(1, 1), (0, 0), (2, 2), (3, 3), (4, 4)]


def test_a_gan_on_two_teams_of_a_session(rank: int, size: int) -> None:
    """Two train ops in one run, each with its team: TensorFlow may run them in any order."""
    tf1 = tf.compat.v1
    with tf.Graph().as_default():
        nets = [tf1.get_variable(name, [3], initializer=tf1.zeros_initializer()) for name in ("d", "g")]
        ops = []
        for team, net in enumerate(nets):
            optimizer = dt.DistributedOptimizer(tf1.train.GradientDescentOptimizer(1.0), team=team, nteam=2)
            ops.append(optimizer.minimize(tf.reduce_sum(net) * float(rank + 1 + team), var_list=[net]))
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            for _ in range(50):
                session.run(ops)
            d, g = session.run(nets)
    np.testing.assert_allclose(d, [-50 * (size + 1) / 2] * 3)
    np.testing.assert_allclose(g, [-50 * ((size + 1) / 2 + 1)] * 3)
