"""The TensorFlow ops on 1, 2 and 3 ranks: values, gradients, shapes and errors, eagerly and in a `tf.function`."""

from __future__ import annotations

import re

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

import keras  # noqa: E402

import dl_comm as mc  # noqa: E402
import dl_comm.tensorflow as dt  # noqa: E402
from dl_comm.tensorflow import _ops  # noqa: E402


def test_inputs_keep_their_values(rank, size):
    variable = tf.Variable([float(rank)] * 4)
    tensor = tf.fill([5], float(rank))
    dt.gradients([variable, tensor, tensor])
    dt.broadcast([tensor, tensor])
    np.testing.assert_array_equal(variable.numpy(), [rank] * 4)
    np.testing.assert_array_equal(tensor.numpy(), [rank] * 5)


def test_in_a_function_with_static_and_unknown_shapes(rank, size):
    @tf.function(
        input_signature=[tf.TensorSpec([2, 3]), tf.TensorSpec([None, 3]), tf.TensorSpec(None, tf.float64)],
    )
    def step(fixed, partly, unknown):
        means = dt.gradients([fixed * 1.0, partly + 0.0, unknown * 2.0])
        spread = dt.broadcast([partly], size - 1)
        assert means[0].shape == [2, 3]
        assert means[1].shape.as_list() == spread[0].shape.as_list() == [None, 3]
        assert means[2].shape.rank is None
        return [*means, *spread]

    for rows in (1, 4):
        fixed, partly, unknown, spread = step(
            tf.fill([2, 3], float(rank)), tf.fill([rows, 3], rank + 1.0), tf.fill([rows], tf.cast(rank, tf.float64))
        )
        np.testing.assert_allclose(fixed, np.full((2, 3), (size - 1) / 2), rtol=1e-6)
        np.testing.assert_allclose(partly, np.full((rows, 3), (size + 1) / 2), rtol=1e-6)
        np.testing.assert_allclose(unknown, np.full(rows, float(size - 1)), rtol=1e-12)
        np.testing.assert_array_equal(spread, np.full((rows, 3), float(size)))


def test_two_teams_in_one_function(rank, size):
    @tf.function
    def step(x):
        return dt.gradients([x], 0)[0], dt.gradients([2 * x], team=1)[0]

    for _ in range(10):
        one, two = step(tf.fill([100], float(rank)))
        np.testing.assert_allclose(one, np.full(100, (size - 1) / 2), rtol=1e-6)
        np.testing.assert_allclose(two, np.full(100, float(size - 1)), rtol=1e-6)


def test_one_rank_alone_traces_again(rank, size):
    @tf.function
    def step(x, number):
        first = dt.gradients([x])[0]
        return first + dt.gradients([x * 2])[0] + 0 * number

    for number in range(4):
        # A Python number is part of the trace, so that rank 0 traces four times and the others once.
        result = step(tf.constant(float(rank)), number if rank == 0 else 0)
        np.testing.assert_allclose(result, 3 * (size - 1) / 2, rtol=1e-6)


def test_indexed_slices_become_dense(rank, size):
    slices = tf.IndexedSlices(tf.constant([[1.0, 2.0], [1.0, 1.0]]), tf.constant([rank, rank]), tf.constant([size, 2]))
    mean = dt.gradients([slices])[0]
    np.testing.assert_allclose(mean, np.tile([2.0 / size, 3.0 / size], (size, 1)), rtol=1e-6)


def test_gradients_in_a_function_are_not_converted_by_autograph(rank, size, caplog, capfd):
    tf.autograph.set_verbosity(0)

    @tf.function
    def step(x):
        (mean,) = mc.gradients([x], 0)
        (same,) = mc.broadcast([mean], 0)
        return mc.average(same) + mc.get_rank() * 0

    assert float(step(tf.constant(float(rank)))) == (size - 1) / 2
    assert "AutoGraph" not in caplog.text + "".join(capfd.readouterr())


def test_broadcast_assigns_to_variables(rank, size):
    """Eagerly and in a tf.function; in a TF1 graph the script assigns."""
    variables = [tf.Variable([float(rank)]), tf.Variable(rank), keras.Variable([float(rank)])]
    values = mc.broadcast([*variables, tf.constant(rank)], size - 1)
    assert [float(np.ravel(value)[0]) for value in values] == [size - 1] * 4
    assert [float(np.ravel(variable.numpy())[0]) for variable in variables] == [size - 1] * 3

    variable = tf.Variable([float(rank)])
    tf.function(lambda: mc.broadcast([variable], size - 1))()
    assert variable.numpy() == [size - 1]

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("v", initializer=[float(rank)])
        session.run(tf.compat.v1.global_variables_initializer())
        assert session.run(mc.broadcast([variable], size - 1)[0]) == [size - 1]
        assert session.run(variable) == [rank]


def test_broadcast_variables_and_average(rank, size):
    variables = [tf.Variable([float(rank)] * 3), tf.Variable(rank, dtype=tf.int64), tf.Variable(rank == 0)]
    assert dt.broadcast_variables(variables, size - 1) is None
    np.testing.assert_array_equal(variables[0].numpy(), [size - 1.0] * 3)
    assert int(variables[1]) == size - 1
    assert bool(variables[2]) == (size == 1)
    assert float(dt.average(rank)) == pytest.approx((size - 1) / 2)
    assert dt.average(np.float32(rank)).dtype == tf.float32
    assert float(dt.average(tf.constant(float(rank)))) == pytest.approx((size - 1) / 2)
    assert float(dt.average(np.array(3 + rank))) == 3 + (size - 1) / 2


def test_the_top_level_takes_tensors(rank, size):
    means = mc.gradients([tf.constant([float(rank)]), tf.Variable(float(rank))], 0)
    assert all(tf.is_tensor(mean) for mean in means)
    np.testing.assert_allclose([mean.numpy().item() for mean in means], [(size - 1) / 2] * 2)
    np.testing.assert_array_equal(mc.broadcast([tf.Variable([rank])], 0)[0], [0])


def test_ranks_and_names(rank, size):
    assert (dt.get_rank(), dt.get_nranks()) == (rank, size)
    assert 0 <= dt.local_rank() <= rank


def test_the_ops_share_the_core_of_the_package(rank, size):
    assert dt.core_id() == int(_ops.library().dl_comm_core_id()) == mc.core_id()


@pytest.mark.parametrize("in_graph", [False, True])
def test_one_tensor_or_number_instead_of_a_list(rank, size, in_graph):
    run, last = tf.function if in_graph else lambda function: function, size - 1
    x = tf.fill([2, 3], float(rank))
    mean = run(lambda: dt.gradients(x))()
    assert mean.shape == (2, 3)
    assert mean.numpy().tolist() == [[(size - 1) / 2] * 3] * 2
    assert float(run(lambda: dt.gradients(float(rank)))()) == (size - 1) / 2
    assert run(lambda: dt.broadcast(x, last))().numpy().tolist() == [[last] * 3] * 2
    assert float(run(lambda: dt.broadcast(rank + 0.5, last, name="number"))()) == last + 0.5
    variable = tf.Variable(x)
    new = run(lambda: dt.broadcast(variable, last, in_place=False))()
    assert new.numpy().tolist() == [[last] * 3] * 2
    assert variable.numpy().tolist() == [[rank] * 3] * 2
    run(lambda: dt.broadcast(variable, last))()
    assert variable.numpy().tolist() == [[last] * 3] * 2
    assert mc.broadcast(x, last).numpy().tolist() == [[last] * 3] * 2


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ([], ValueError),
        ([None], ValueError),
        (None, TypeError),
        ("text", TypeError),
        (["text"], TypeError),
        ([tf.constant(True)], TypeError),
        ([tf.constant(1j)], TypeError),
    ],
    ids=["empty", "none", "nothing", "string", "text", "bool", "complex"],
)
def test_bad_lists_are_refused(rank, size, given, error):
    with pytest.raises(error):
        dt.gradients(given)
    np.testing.assert_allclose(dt.gradients([tf.constant(float(rank))])[0], (size - 1) / 2)


@pytest.mark.parametrize("team", [-2, -1])
def test_a_negative_team_is_refused_before_anything_runs(rank, size, team):
    for call in (
        lambda: dt.gradients([tf.constant(1.0)], team),
        # AutoGraph would wrap the exception in one of its own, with the same text.
        lambda: tf.function(lambda x: dt.gradients([x], team), autograph=False)(tf.constant(1.0)),
        lambda: dt.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), team=team),
        lambda: dt.DistributedOptimizer(tf.keras.optimizers.SGD(0.1), team=team),
    ):
        with pytest.raises(mc.ArgumentError, match=f"team {team} is out of range; teams go from 0"):
            call()


def test_a_team_that_is_not_there(rank, size):
    with pytest.raises(mc.ArgumentError, match="^[^{]*99"):
        dt.gradients([tf.constant(1.0)], 99)
    np.testing.assert_allclose(dt.gradients([tf.constant(float(rank))])[0], (size - 1) / 2)


@pytest.mark.parametrize("past", [True, False])
def test_a_root_that_is_not_there(rank, size, past):
    root = size if past else -1
    with pytest.raises(mc.ArgumentError, match=f"root {root}"):
        dt.broadcast([tf.constant(1.0)], root)
    assert float(dt.broadcast([tf.constant(float(rank))])[0]) == 0.0


@pytest.mark.parametrize("what", ["shape", "dtype", "count", "name"])
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_calls_that_differ_fail_everywhere_and_the_next_one_works(rank, size, what, mode):
    if size == 1:
        pytest.skip("needs two ranks")
    odd = rank == size - 1
    tensors = [tf.ones([3 if odd and what == "shape" else 2], tf.float64 if odd and what == "dtype" else tf.float32)]
    tensors *= 2 if odd and what == "count" else 1
    name = "odd" if odd and what == "name" else "even"

    def call():
        return dt.gradients(tensors, name=name)

    with pytest.raises(tf.errors.InvalidArgumentError if mode == "function" else mc.MismatchError) as raised:
        (tf.function(call) if mode == "function" else call)()
    error = mc.error_of(raised.value)
    assert isinstance(error, mc.MismatchError)
    assert not re.search(r"node|\[Op:|dl_comm error", str(error)), error
    np.testing.assert_allclose(dt.gradients([tf.constant(float(rank))])[0], (size - 1) / 2)


def test_xla_is_refused(rank, size):
    @tf.function(jit_compile=True)
    def compiled(x):
        return dt.gradients([x])[0]

    with pytest.raises(mc.StateError, match="XLA"):
        compiled(tf.constant(1.0))
    with pytest.raises(mc.ArgumentError, match="team -1"):
        tf.function(lambda x: mc.gradients([x], -1)[0])(tf.constant(1.0))
    np.testing.assert_allclose(dt.gradients([tf.constant(float(rank))])[0], (size - 1) / 2)


def test_ranks_with_parts_of_a_batch_equal_one_rank_with_all_of_it(rank, size):
    # float64, so that the order of additions, the only difference, shows at 1e-15 and a wrong average at 1e-2.
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(12 * size, 5)), rng.normal(size=(12 * size, 1))

    def train(images, targets, distributed):
        first = tf.Variable(np.random.default_rng(rank if distributed else 0).normal(size=(5, 8)))
        second = tf.Variable(np.ones((8, 1)))
        if distributed:
            dt.broadcast_variables([first, second], 0)

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((tf.tanh(images @ first) @ second - targets) ** 2)
            grads = tape.gradient(loss, [first, second])
            if distributed:
                grads = dt.gradients(grads)
            for variable, grad in zip([first, second], grads, strict=True):
                variable.assign_sub(0.1 * grad)

        for _ in range(20):
            step()
        return [first.numpy(), second.numpy()]

    alone = train(x, y, distributed=False)
    together = train(x[rank::size], y[rank::size], distributed=True)
    for mine, expected in zip(together, alone, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-9, atol=1e-12)
    assert mc.check_buffers_match(together, 0) == 0


@pytest.mark.parametrize("gradients", [mc.gradients, dt.gradients], ids=["package", "binding"])
def test_a_generator_of_tensors_is_a_list(gradients, rank, size):
    means = gradients(tf.fill([2], float(rank + i)) for i in range(3))
    assert [mean.numpy().tolist() for mean in means] == [[(size - 1) / 2 + i] * 2 for i in range(3)]
