"""Ranks that list the same variables in other orders, or made more layers before: 1 to 3 ranks."""

from __future__ import annotations

import time

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

import keras  # noqa: E402

import dl_comm as mc  # noqa: E402
import dl_comm.keras as dk  # noqa: E402
import dl_comm.tensorflow as dt  # noqa: E402

v1 = tf.compat.v1
LAYERS = 3


@pytest.fixture(autouse=True)
def _session():
    """Keras keeps the type of the first layer for later ones."""
    yield
    keras.backend.clear_session()


def rotated(listed, by):
    by %= len(listed)
    return [*listed[by:], *listed[:by]]


def make_model(rank, seed=3):
    """A chain of equal layers; each rank has made another number of layers before."""
    for _ in range(2 * rank):
        keras.layers.Dense(1)
        keras.Sequential()
    layers = [
        keras.layers.Dense(4, kernel_initializer=keras.initializers.GlorotNormal(seed + i)) for i in range(LAYERS)
    ]
    return keras.Sequential([keras.Input((4,)), *layers])


def gradient_of(i, rank):
    return (i + 1) * 10.0 + rank


@pytest.mark.parametrize("call", ["broadcast", "broadcast_variables", "gradients", "allreduce", "reduce"])
@pytest.mark.parametrize("compiled", [False, True])
def test_calls_with_variables(call, compiled, rank, size):
    variables = [tf.Variable([i + 10.0 * rank] * 2, name=name) for i, name in enumerate("cab")]
    order = rotated([0, 1, 2], rank)
    given = [variables[i] for i in order]
    root = size - 1

    def run():
        if call == "gradients":
            return dt.gradients(given)
        if call == "allreduce":
            return dt.allreduce(given, "mean")
        if call == "reduce":
            return dt.reduce(given, root)
        getattr(dt, call)(given, root)
        return [tf.identity(variable) for variable in given]

    results = (tf.function(run) if compiled else run)()
    middle = 10 * (size - 1) / 2
    for i, result in zip(order, results, strict=True):
        expected = {"gradients": i + middle, "allreduce": i + middle, "reduce": size * (i + middle)}
        if call != "reduce" or rank == root:
            np.testing.assert_array_equal(result, [expected.get(call, i + 10 * root)] * 2)


@pytest.mark.parametrize("compiled", [False, True])
def test_adasum(compiled, rank):
    """Of equal vectors it is that vector."""
    variables = [tf.Variable([i + 1.0] * 2, name=name) for i, name in enumerate("cab")]
    order = rotated([0, 1, 2], rank)

    def run():
        return dt.allreduce([variables[i] for i in order], "adasum")

    for i, result in zip(order, (tf.function(run) if compiled else run)(), strict=True):
        np.testing.assert_allclose(result, [i + 1.0] * 2)


def test_other_variables(rank, size):
    if size == 1:
        pytest.skip("needs two ranks")
    variables = [tf.Variable([float(rank)], name=f"{name}{'x' * (rank and name == 'b')}") for name in "cab"]
    with pytest.raises(mc.MismatchError) as failure:
        dt.broadcast_variables(variables)
    assert "'b:0'" in str(failure.value)
    assert "'bx:0'" in str(failure.value)
    assert all(float(variable[0]) == rank for variable in variables)
    assert float(dt.average(float(rank))) == (size - 1) / 2


def test_other_names_of_calls_after_a_function(rank, size):
    """The threads that have run the function do not delay the decision."""
    if size == 1:
        pytest.skip("needs two ranks")
    tf.function(lambda: dt.allreduce(tf.ones(3)))()
    start = time.monotonic()
    with pytest.raises(mc.MismatchError):
        dt.allreduce(tf.ones(3), name=f"name {rank}")
    # Far below DL_COMM_MATCH_TIMEOUT_S.
    assert time.monotonic() - start < 20
    assert float(dt.average(float(rank))) == (size - 1) / 2


@pytest.mark.parametrize("mode", ["eager", "function", "accumulated", "kept"])
def test_an_optimizer_with_variables_in_another_order(mode, rank, size):
    model = make_model(rank)
    start = [variable.numpy() for variable in model.trainable_variables]
    every = 2 if mode == "accumulated" else None
    base = keras.optimizers.SGD(1.0, gradient_accumulation_steps=every, clipnorm=1e9)
    optimizer = dk.DistributedOptimizer(base, broadcast=mode != "kept")
    order = rotated(range(2 * LAYERS), 2 * rank)
    variables = [model.trainable_variables[i] for i in order]

    def step():
        grads = [tf.fill(each.shape, gradient_of(i, rank)) for i, each in zip(order, variables, strict=True)]
        optimizer.apply(grads, variables)

    step = tf.function(step) if mode == "function" else step
    for _ in range(2):
        step()
    times = 1 if mode == "accumulated" else 2
    for i, (before, after) in enumerate(zip(start, model.trainable_variables, strict=True)):
        mean = times * gradient_of(i, (size - 1) / 2)
        np.testing.assert_allclose(before - after.numpy(), np.full(before.shape, mean), rtol=1e-5)


def test_an_optimizer_of_a_graph_with_variables_in_another_order(rank, size):
    with tf.Graph().as_default():
        variables = [v1.get_variable(name, initializer=[0.0, 0.0]) for name in "cab"]
        order = rotated(range(3), rank)
        loss = tf.add_n([gradient_of(i, rank) * tf.reduce_sum(each) for i, each in enumerate(variables)])
        optimizer = dt.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0))
        train = optimizer.minimize(loss, var_list=[variables[i] for i in order])
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            session.run(train)
            for i, value in enumerate(session.run(variables)):
                np.testing.assert_array_equal(value, [-gradient_of(i, (size - 1) / 2)] * 2)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_that_are_none_on_other_ranks(compiled, rank, size):
    if size == 1:
        pytest.skip("needs two ranks")
    model = make_model(rank)
    optimizer = dk.DistributedOptimizer(keras.optimizers.SGD(1.0))
    variables = model.trainable_variables

    def step():
        grads = [tf.ones(each.shape) for each in variables]
        grads[2 * (rank == 0)] = None  # a kernel, of equal shape
        optimizer.apply(grads, variables)

    step = tf.function(step) if compiled else step
    with pytest.raises((mc.MismatchError, tf.errors.InvalidArgumentError)) as failure:
        step()
    error = mc.error_of(failure.value)
    assert isinstance(error, mc.MismatchError)
    assert "dense/kernel" in str(error)
    assert float(dt.average(float(rank))) == (size - 1) / 2


def test_fit_with_layers_numbered_by_each_process(rank, size):
    """The names differ, and the models have the same structure."""
    model = make_model(rank, seed=5 + rank)
    x = np.random.default_rng(rank).normal(size=(8, 4))
    model.compile(dk.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
    model.fit(x, x, batch_size=4, epochs=2, verbose=0, callbacks=[dk.BroadcastCallback()])
    weights = [*model.weights, *model.optimizer.variables]
    assert mc.check_buffers_match([np.asarray(weight) for weight in weights]) == 0


def test_names_by_structure(rank):
    """Whatever numbers Keras gives, and in whatever order, equal structures have equal names."""
    from dl_comm._arrays.tensor_names import by_structure

    def paths(first):
        numbered = [f"dense_{n}" if n else "dense" for n in range(first, first + 12)]
        return [
            *(f"sequential_{first}/{name}/{part}" for name in numbered for part in ("kernel", "bias")),
            *(f"adam/sequential_{first}_{name}_kernel_momentum" for name in numbered),
            "adam/iteration",
        ]

    expected = by_structure(paths(0))
    assert len(set(expected)) == len(expected)
    for first in (1, 5, 9, 95):
        assert by_structure(paths(first)) == expected
        assert by_structure(paths(first)[::-1]) == expected[::-1]
    assert by_structure(["a", "a", "a_1"]) == ["a", "a", "a#1"]
