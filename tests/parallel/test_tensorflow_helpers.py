"""What only TensorFlow has in the helpers: rates in graphs, metrics that are variables."""

from __future__ import annotations

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

import dl_comm as mc  # noqa: E402
import dl_comm.tensorflow as dt  # noqa: E402
from dl_comm import training  # noqa: E402

STEPS = [0, 1, 3, 4, 7, 10, 11, 10**8]


def all_schedules() -> list[training.Schedule]:
    return [
        training.Constant(0.1),
        training.Piecewise((4, 10), (0.1, 0.01, 0.001)),
        training.Polynomial(0.3, 10, end=0.1, power=2.0),
        training.Cosine(0.3, 10),
        training.Exponential(0.3, 10**7, 0.5),
        training.WarmUp(4, training.Cosine(training.scaled_lr(0.1), 11)),
    ]


@pytest.mark.parametrize("number", range(6))
def test_rates_of_a_tf1_graph(number: int) -> None:
    schedule = all_schedules()[number]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        step = tf.compat.v1.train.get_or_create_global_step()
        rate = dt.learning_rate(schedule, step)
        value = tf.compat.v1.placeholder(tf.int64, [])
        assign = step.assign(value)
        session.run(tf.compat.v1.global_variables_initializer())
        assert rate.dtype == tf.float32
        for at in STEPS:
            session.run(assign, {value: at})
            assert session.run(rate) == np.float32(schedule(at))


def test_rates_eagerly_and_in_a_function() -> None:
    for schedule in all_schedules():
        step = tf.Variable(0, dtype=tf.int64)
        traced = tf.function(lambda schedule=schedule, step=step: dt.learning_rate(schedule, step, tf.float64))
        for at in STEPS:
            step.assign(at)
            assert float(traced()) == pytest.approx(schedule(at), rel=1e-12)
            assert float(dt.learning_rate(schedule, at)) == np.float32(schedule(at))


def test_a_tf1_optimizer_follows_the_schedule(size: int) -> None:
    v1 = tf.compat.v1
    schedule = training.WarmUp(2, training.Piecewise([3], [training.scaled_lr(0.5), 0.25]))
    with tf.Graph().as_default(), v1.Session() as session:
        variable = v1.get_variable("weight", [], initializer=v1.zeros_initializer())
        global_step = v1.train.get_or_create_global_step()
        optimizer = v1.train.GradientDescentOptimizer(dt.learning_rate(schedule, global_step))
        train = dt.DistributedOptimizer(optimizer).minimize(-variable, global_step)
        session.run(v1.global_variables_initializer())
        for step in range(5):
            session.run(train)
            assert session.run(variable) == pytest.approx(sum(schedule(at) for at in range(step + 1)))


def test_metrics_of_variables_and_of_graphs(rank: int, size: int) -> None:
    assert mc.average_metrics({"v": tf.Variable(2 * rank)}) == {"v": size - 1}
    with pytest.raises(mc.DTypeError, match="'loss' is not a number"), tf.Graph().as_default():
        mc.average_metrics({"loss": tf.constant(1.0)})
