"""`group=` for TensorFlow and Keras: the ranks of a group train as one process with their batches."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import dl_comm as mc
import dl_comm.keras as dk
import dl_comm.tensorflow as mtf

pytestmark = pytest.mark.costly


@pytest.fixture
def group(rank):
    """The ranks 0 and 2, and rank 1: their sizes differ."""
    with mc.split(rank % 2) as made:
        yield made


def model_from(seed, layer=keras.layers.BatchNormalization, **options):
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), layer(**options), keras.layers.Dense(1)])


def joined(members, rows=8):
    """Batches of four rows of each of some ranks, one after the other."""
    each = [np.random.default_rng(member).normal(size=(rows, 4)).astype(np.float32) for member in members]
    joined = np.concatenate([part[at : at + 4] for at in range(0, rows, 4) for part in each])
    return joined[:, :3], joined[:, 3:]


def test_fit_with_callbacks(rank, size, group):
    model, alone = model_from(rank, dk.SyncBatchNormalization, group=group), model_from(group.ranks[0])
    model.compile(dk.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), group=group), "mse")
    alone.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    callbacks = [dk.BroadcastCallback(0, group=group), dk.MetricAverageCallback(group=group)]
    options = {"epochs": 2, "shuffle": False, "verbose": 0}
    mine = model.fit(*joined([rank]), batch_size=4, callbacks=callbacks, **options)
    whole = alone.fit(*joined(group.ranks), batch_size=4 * group.size, **options)
    for weights, expected in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(weights, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(mine.history["loss"], whole.history["loss"], rtol=1e-4)
    assert dk.average_logs({"x": rank}, group=group) == {"x": sum(group.ranks) / group.size}


def test_an_optimizer_starts_from_rank_0_of_its_group(rank, size, group):
    weight = keras.Variable([float(rank)])
    optimizer = dk.DistributedOptimizer(keras.optimizers.SGD(1.0), group=group)
    optimizer.apply([tf.constant([1.0 + rank])], [weight])
    np.testing.assert_allclose(weight.numpy(), [group.ranks[0] - sum(m + 1 for m in group.ranks) / group.size])


@pytest.mark.parametrize("traced", [False, True])
def test_gradients_broadcasts_and_means(rank, size, group, traced):
    def calls():
        x = tf.fill([2], float(rank))
        with tf.GradientTape() as tape:
            tape.watch(x)
            mean = mtf.gradients([x], group=group)[0]
            loss = tf.reduce_sum((rank + 1) * mean)
        copied = mtf.broadcast([x], group.size - 1, group=group)[0]
        return mean, tape.gradient(loss, x), copied, mtf.average(x[0], group=group)

    mean, slope, copied, average = (tf.function(calls) if traced else calls)()
    expected = sum(group.ranks) / group.size
    assert mean.numpy().tolist() == [expected] * 2
    np.testing.assert_allclose(slope.numpy(), [sum(member + 1 for member in group.ranks) / group.size] * 2, rtol=1e-6)
    assert copied.numpy().tolist() == [group.ranks[-1]] * 2
    assert average.numpy() == expected
    variables = [tf.Variable(rank), tf.Variable(-rank)]
    mtf.broadcast_variables(variables[:: 1 if rank < 2 else -1], group.size - 1, group=group)
    if group.size == 1:
        assert variables[0].numpy() == rank


def test_optimizers_of_tensorflow_1(rank, size, group):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("w", initializer=float(rank))
        optimizer = mtf.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0), group=group)
        step = optimizer.minimize((rank + 1.0) * variable)
        start = mtf.broadcast_variables([variable], 0, group=group)
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(start)
        session.run(step)
        mean = sum(member + 1 for member in group.ranks) / group.size
        np.testing.assert_allclose(session.run(variable), group.ranks[0] - mean)


def test_a_group_has_no_schedule(group):
    for options in ({"team": 1}, {"nstep": 10}):
        with pytest.raises(mc.ArgumentError, match="group"):
            dk.DistributedOptimizer("adam", group=group, **options)


def test_what_has_no_group_of_its_own_has_that_of_the_optimizer(rank, size, group, tmp_path):
    """A broadcast over all ranks would overwrite the other parts of a split model."""
    model = model_from(rank, dk.SyncBatchNormalization, group=group)
    model.compile(dk.DistributedOptimizer(keras.optimizers.SGD(0.0), group=group, broadcast=False), "mse")
    expected = model_from(group.ranks[0]).get_weights()
    model.fit(*joined([rank]), batch_size=4, callbacks=[dk.BroadcastCallback()], verbose=0)
    np.testing.assert_array_equal(model.get_weights()[0], expected[0])
    with pytest.raises(mc.ArgumentError, match="no group"):
        type(model.optimizer).from_config(model.optimizer.get_config())
    model.save(tmp_path / "model.keras")
    again = dk.load_model(tmp_path / "model.keras", group=group)
    assert again.optimizer._dl_comm_group is group
    assert [layer._group for layer in again.layers if isinstance(layer, dk.SyncBatchNormalization)] == [group]
    assert dk.SyncBatchNormalization()._group is None
