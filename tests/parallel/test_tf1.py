"""TensorFlow 1 style on 1, 2 and 3 ranks: graphs, sessions, hooks and TF1 optimizers, through tf.compat.v1."""

from __future__ import annotations

import time

import numpy as np
import pytest

tf2 = pytest.importorskip("tensorflow")

import dl_comm as mc  # noqa: E402
import dl_comm.tensorflow as dt  # noqa: E402
from dl_comm.tensorflow import _ops  # noqa: E402

pytestmark = pytest.mark.costly

tf = tf2.compat.v1


class PortingGuideHook(tf.train.SessionRunHook):
    """The hook of the Cray porting guide, as it stands there."""

    def __init__(self):
        self.bcast = None

    def begin(self):  # noqa: D102
        if not self.bcast:
            new_vars = mc.broadcast(tf.trainable_variables(), 0)
            self.bcast = tf.group(*[tf.assign(v, new_vars[k]) for k, v in enumerate(tf.trainable_variables())])

    def after_create_session(self, session, coord):  # noqa: D102
        session.run(self.bcast)


def test_ops_in_a_session(rank, size):
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [None, 2])
        mean = dt.gradients([x])[0]
        spread = dt.broadcast([x], size - 1)[0]
        assert mean.shape.as_list() == spread.shape.as_list() == [None, 2]
        with tf.Session() as session:
            for rows in (1, 5):
                given = {x: np.full((rows, 2), float(rank))}
                np.testing.assert_allclose(session.run(mean, given), np.full((rows, 2), (size - 1) / 2))
                np.testing.assert_array_equal(session.run(spread, given), np.full((rows, 2), size - 1.0))


def test_like_calls_of_a_graph_have_names_of_their_own():
    names = []
    for _ in range(2):
        with tf.Graph().as_default() as graph:
            for _ in range(2):
                dt.gradients([tf.constant(1.0)])
            dt.gradients([tf.constant(1.0)], 1)
            dt.broadcast([tf.constant(1.0)])
            ops = [op for op in graph.get_operations() if op.type.startswith("DlComm")]
            names.append([_ops.settings_of(op)[1] for op in ops])
    assert names == [["gradients", "gradients:1", "gradients", "broadcast"]] * 2


@pytest.mark.parametrize("resource", [True, False], ids=["resource", "reference"])
@pytest.mark.parametrize("hook", [dt.BroadcastHook, PortingGuideHook], ids=["ours", "guide"])
def test_hooks_give_all_ranks_the_same_start(rank, size, hook, resource):
    with tf.Graph().as_default():
        tf.get_variable("v", initializer=tf.fill([3], float(rank + 1)), use_resource=resource)
        tf.get_variable("w", initializer=tf.constant(rank + 5.0), use_resource=resource)
        variables = tf.trainable_variables()
        with tf.train.MonitoredTrainingSession(hooks=[hook()]) as session:
            v, w = session.run(variables)
    np.testing.assert_array_equal(v, [1.0, 1.0, 1.0])
    assert w == 5.0


def test_hook_covers_other_roots_and_variables_that_are_not_trained(rank, size):
    with tf.Graph().as_default():
        step = tf.get_variable("step", initializer=np.int64(rank), trainable=False)
        flag = tf.get_variable("flag", initializer=np.bool_(rank == size - 1), trainable=False)
        with tf.train.MonitoredTrainingSession(hooks=[dt.BroadcastHook(root=size - 1)]) as session:
            assert session.run(step) == size - 1
            assert session.run(flag)


def test_hook_spreads_what_rank_0_restored(rank, size, tmp_path):
    def run(hooks):
        with tf.Graph().as_default():
            weight = tf.get_variable("weight", initializer=tf.constant(float(rank)))
            step = tf.train.get_or_create_global_step()
            train = tf.group(tf.assign_add(weight, 10.0), tf.assign_add(step, 1))
            folder = str(tmp_path) if rank == 0 else None
            with tf.train.MonitoredTrainingSession(checkpoint_dir=folder, hooks=hooks) as session:
                before = session.run([weight, step])
                session.run(train)
            return before

    assert run([]) == [float(rank), 0]
    assert run([dt.BroadcastHook()]) == [10.0, 1]


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: tf.train.GradientDescentOptimizer(0.1),
        lambda: tf.train.MomentumOptimizer(0.05, 0.9),
        lambda: tf.train.AdamOptimizer(0.01),
    ],
    ids=["sgd", "momentum", "adam"],
)
@pytest.mark.parametrize("way", ["minimize", "gradients"])
def test_training_equals_one_rank_with_the_whole_batch(rank, size, optimizer, way):
    # float64, so that the order of additions, the only difference, shows at 1e-15 and a wrong average at 1e-2. Adam
    # divides by the root of a mean of squares and makes more of it, hence 1e-7.
    rng = np.random.default_rng(11)
    x, y = rng.normal(size=(6 * size, 4)), rng.normal(size=(6 * size, 1))

    def train(images, targets, distributed):
        with tf.Graph().as_default():
            seed = rank if distributed else 0
            initial = np.random.default_rng(seed).normal(size=(4, 1))
            weight = tf.get_variable("weight", initializer=initial)
            unused = tf.get_variable("unused", initializer=1.0)
            loss = tf.reduce_mean(tf.square(tf.tanh(images @ weight) - targets))
            step = tf.train.get_or_create_global_step()
            chosen = optimizer()
            if not distributed:
                train_op = chosen.minimize(loss, step)
            elif way == "minimize":
                train_op = dt.DistributedOptimizer(chosen).minimize(loss, step)
            else:
                pairs = chosen.compute_gradients(loss, [weight])
                means = mc.gradients([grad for grad, _ in pairs], 0)
                train_op = chosen.apply_gradients([(g, v) for (_, v), g in zip(pairs, means, strict=True)], step)
            hooks = [tf.train.StopAtStepHook(last_step=20)] + ([dt.BroadcastHook()] if distributed else [])
            with tf.train.MonitoredTrainingSession(hooks=hooks) as session:
                while not session.should_stop():
                    _, result, left = session.run([train_op, weight, unused])
            assert left == 1.0
            return result

    together = train(x[rank::size], y[rank::size], distributed=True)
    np.testing.assert_allclose(together, train(x, y, distributed=False), rtol=1e-7)
    assert mc.check_buffers_match([together], 0) == 0


def test_gradient_of_the_op(rank, size):
    with tf.Graph().as_default():
        x = tf.constant([1.0, 2.0])
        y = (rank + 1.0) * tf.reduce_sum(dt.gradients([x])[0] ** 2)
        with tf.Session() as session:
            np.testing.assert_allclose(session.run(tf.gradients(y, x))[0], np.array([2.0, 4.0]) * (size + 1) / 2)


def test_wrapping_twice_or_something_else():
    wrapped = dt.DistributedOptimizer(tf.train.GradientDescentOptimizer(0.1))
    with pytest.raises(ValueError, match="already"):
        dt.DistributedOptimizer(wrapped)
    with pytest.raises(TypeError, match="optimizer"):
        dt.DistributedOptimizer(object())


def test_error_in_a_session_and_the_next_run_works(rank, size):
    if size == 1:
        pytest.skip("needs two ranks")
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [None])
        mean = dt.gradients([x])[0]
        with tf.Session() as session:
            with pytest.raises(tf.errors.InvalidArgumentError, match="dl_comm error -4"):
                session.run(mean, {x: np.zeros(rank + 1)})
            np.testing.assert_allclose(session.run(mean, {x: np.full(2, float(rank))}), [(size - 1) / 2] * 2)


def in_loops(loop, slow, parallel_iterations: int) -> np.ndarray:
    """Average what `loop(body)` feeds to `body` in every iteration; the `slow` iterations come to it late."""

    def late(i):
        time.sleep(0.02 if slow(int(i)) else 0.0)
        return np.float32(i)

    def body(i):
        value = tf2.numpy_function(late, [i], tf.float32, stateful=False)
        return dt.gradients([tf.fill([10], value)])[0][0]

    threads = tf.ConfigProto(inter_op_parallelism_threads=4, use_per_session_threads=True)
    with tf.Graph().as_default():
        results = loop(body, parallel_iterations)
        with tf.Session(config=threads) as session:
            return session.run(results)


def single_loop(body, parallel_iterations):
    _, results = tf.while_loop(
        lambda i, _: i < 12,
        lambda i, results: (i + 1, results.write(i, body(i))),
        [0, tf.TensorArray(tf.float32, 12)],
        parallel_iterations=parallel_iterations,
    )
    return results.stack()


def nested_loops(body, parallel_iterations):
    # The inner loops have one iteration each: they differ in their outer iteration only.
    def outer(i, results):
        _, mean = tf.while_loop(
            lambda j, _: j < 1,
            lambda j, _: (j + 1, body(i)),
            [0, 0.0],
            parallel_iterations=parallel_iterations,
        )
        return i + 1, results.write(i, mean)

    _, results = tf.while_loop(
        lambda i, _: i < 12,
        outer,
        [0, tf.TensorArray(tf.float32, 12)],
        parallel_iterations=parallel_iterations,
    )
    return results.stack()


@pytest.fixture(params=[True, False], ids=["control flow 2", "control flow 1"])
def control_flow(request):
    (tf.enable_control_flow_v2 if request.param else tf.disable_control_flow_v2)()
    yield
    tf.enable_control_flow_v2()


def test_the_iteration_of_a_loop_is_part_of_what_ranks_compare(rank, size, control_flow):
    """Else iterations that run in another order on each rank would be averaged with one another."""
    if size == 1:
        pytest.skip("needs two ranks")

    def twice(average_in):
        value = tf.fill([10], 1.0)

        def body(i, mean):
            return i + 1, tf.cond(tf.equal(i, average_in), lambda: dt.gradients([value])[0][0], lambda: mean)

        return tf.while_loop(lambda i, _: i < 2, body, [0, 0.0], parallel_iterations=1)[1]

    with tf.Graph().as_default():
        result = twice(0 if rank == 0 else 1)
        with (
            tf.Session() as session,
            pytest.raises(tf.errors.InvalidArgumentError, match="(?s)iteration 0 of loop.*iteration 1 of loop"),
        ):
            session.run(result)
    np.testing.assert_allclose(dt.gradients([tf2.constant(float(rank))])[0], (size - 1) / 2)


@pytest.mark.parametrize("parallel_iterations", [1, 12])
@pytest.mark.parametrize("loop", [single_loop, nested_loops])
def test_iterations_agree_one_after_the_other_and_side_by_side(rank, size, loop, parallel_iterations, control_flow):
    means = in_loops(loop, lambda i: i % size == rank, parallel_iterations)
    np.testing.assert_array_equal(means, np.arange(12))
