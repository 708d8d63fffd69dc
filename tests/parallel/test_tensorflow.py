"""The TensorFlow ops on 1, 2 and 3 ranks: values, gradients, shapes and errors, eagerly and in a `tf.function`."""

from __future__ import annotations

import re

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

import keras  # noqa: E402

import dl_comm as mc  # noqa: E402
import dl_comm.tensorflow as dt  # noqa: E402
import ml_comm.tensorflow  # noqa: E402
from dl_comm.tensorflow import _ops  # noqa: E402

FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
EPSILON = dict(zip(FLOATS, (2.0**-10, 2.0**-7, 2.0**-23, 2.0**-52), strict=True))
INTEGERS = (tf.int8, tf.uint8, tf.int32, tf.int64)
OTHERS = (tf.bool, tf.int16, tf.uint16, tf.uint32, tf.uint64, tf.complex64, tf.complex128)


def numbers(rank: int, count: int = 11) -> np.ndarray:
    """Small whole numbers, different on every rank, whose sums are exact in every type."""
    return (np.arange(count) * (rank + 1) + rank) % 23


def mean_of_numbers(size: int, count: int = 11) -> np.ndarray:
    """The mean of `numbers` over the ranks, in float64."""
    return np.sum([numbers(rank, count) for rank in range(size)], axis=0) / size


def value(tensor) -> np.ndarray:
    """A tensor as float64, whatever its type."""
    return tf.cast(tensor, tf.float64).numpy()


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
def test_mean_of_floats(rank, size, dtype):
    mean = dt.gradients([tf.cast(numbers(rank), dtype)])[0]
    assert mean.dtype == dtype
    # The sums are exact, so that only the division rounds, and the conversion to the type: two units in the last place.
    np.testing.assert_allclose(value(mean), mean_of_numbers(size), rtol=2 * EPSILON[dtype])


@pytest.mark.parametrize("dtype", INTEGERS, ids=lambda dtype: dtype.name)
def test_mean_of_integers_rounds_toward_zero(rank, size, dtype):
    mean = dt.gradients([tf.cast(numbers(rank), dtype)])[0]
    assert mean.dtype == dtype
    np.testing.assert_array_equal(value(mean), np.trunc(mean_of_numbers(size)))
    if dtype.min < 0:
        negative = dt.gradients([tf.cast([-1 if rank == 0 else 0, -7], dtype)])[0]
        np.testing.assert_array_equal(value(negative), [-1 if size == 1 else 0, -7])


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS + OTHERS, ids=lambda dtype: dtype.name)
def test_broadcast(rank, size, dtype):
    root = size - 1
    result = dt.broadcast([tf.cast(numbers(rank), dtype), tf.cast(rank, dtype)], root)
    np.testing.assert_array_equal(result[0].numpy(), tf.cast(numbers(root), dtype).numpy())
    np.testing.assert_array_equal(result[1].numpy(), tf.cast(root, dtype).numpy())


def test_many_tensors_of_all_kinds_in_one_call(rank, size):
    shapes = [(), (0,), (1,), (3, 0, 2), (2, 3), (1, 2, 3, 4), (1000,)]
    dtypes = [tf.float32, tf.int64, tf.float64, tf.float16, tf.int8]
    given = [tf.cast(tf.fill(shape, rank + i % 9), dtypes[i % len(dtypes)]) for i, shape in enumerate(shapes * 20)]
    means = dt.gradients(given)
    assert [mean.shape for mean in means] == [tensor.shape for tensor in given]
    assert [mean.dtype for mean in means] == [tensor.dtype for tensor in given]
    for i, mean in enumerate(means):
        expected = (size - 1) / 2 + i % 9
        expected = np.trunc(expected) if mean.dtype.is_integer else expected
        np.testing.assert_allclose(value(mean), np.full(mean.shape, expected), rtol=1e-3)


def test_a_large_tensor_has_the_same_bits_everywhere(rank, size):
    given = tf.random.stateless_normal([1 << 20], seed=[rank, 7])
    mean = dt.gradients([given])[0].numpy()
    assert mc.check_buffers_match([mean], 0) == 0
    expected = np.mean([tf.random.stateless_normal([1 << 20], seed=[r, 7]).numpy() for r in range(size)], axis=0)
    np.testing.assert_allclose(mean, expected, rtol=1e-5, atol=1e-6)


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


def test_gradient_is_the_mean_of_the_gradients(rank, size):
    x = tf.Variable([1.0, 2.0])

    def loss_gradient():
        with tf.GradientTape() as tape:
            means = dt.gradients([x, tf.constant([rank])])  # the integer has no gradient, and must not be in the way
            loss = (rank + 1.0) * tf.reduce_sum(means[0] ** 2)
        return tape.gradient(loss, x)

    expected = np.array([2.0, 4.0]) * (size + 1) / 2
    np.testing.assert_allclose(loss_gradient(), expected, rtol=1e-6)
    np.testing.assert_allclose(tf.function(loss_gradient)(), expected, rtol=1e-6)


def test_gradient_of_a_gradient(rank, size):
    x = tf.Variable(float(rank + 1))
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            y = dt.gradients([x])[0] ** 3
        first = inner.gradient(y, x)
    mean = (size + 1) / 2
    np.testing.assert_allclose(first, 3 * mean**2, rtol=1e-5)
    np.testing.assert_allclose(outer.gradient(first, x), 6 * mean, rtol=1e-5)


def test_indexed_slices_become_dense(rank, size):
    slices = tf.IndexedSlices(tf.constant([[1.0, 2.0], [1.0, 1.0]]), tf.constant([rank, rank]), tf.constant([size, 2]))
    mean = dt.gradients([slices])[0]
    np.testing.assert_allclose(mean, np.tile([2.0 / size, 3.0 / size], (size, 1)), rtol=1e-6)


def test_every_base_name_is_there():
    names = [
        "get_rank",
        "get_nranks",
        "barrier",
        "init",
        "init_mpi",
        "finalize",
        "average",
        "gradients",
        "broadcast",
        "check_buffers_match",
    ]
    for module in (dt, ml_comm.tensorflow):
        for name in [*names, "check_buffers_match", "config_team", "rank", "size", "local_rank", "get_localrank"]:
            assert callable(getattr(module, name))
            assert name in module.__all__
    assert ml_comm.tensorflow.config_team is ml_comm.config_team is not dt.config_team


def test_metrics_of_integers_are_not_rounded(rank, size):
    for dtype in (tf.int8, tf.int32, tf.int64, tf.uint16, tf.bool):
        tensor = tf.cast(rank % 2, dtype)
        for mean in (dt.average(tensor), mc.average(tensor), tf.function(dt.average)(tensor)):
            assert mean.dtype == tf.float64
            assert float(mean) == pytest.approx(size // 2 / size)
    assert float(dt.average(np.array(3 + rank))) == 3 + (size - 1) / 2


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


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ([], ValueError),
        ([None], ValueError),
        (3.0, TypeError),
        (tf.constant([1.0]), TypeError),
        (["text"], TypeError),
        ([tf.constant(True)], TypeError),
        ([tf.constant(1j)], TypeError),
    ],
    ids=["empty", "none", "number", "tensor", "text", "bool", "complex"],
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
