"""What only TensorFlow has in the collectives: static shapes, sparse tensors, loops, sessions, XLA, variables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

import dl_comm as mc  # noqa: E402
import dl_comm.tensorflow as dt  # noqa: E402
from dl_comm.tensorflow import _ops  # noqa: E402


def test_variables_and_lists_of_numbers(rank: int, size: int) -> None:
    variable = tf.Variable([float(rank)])
    assert dt.allreduce(variable).numpy() == [size * (size - 1) // 2]
    assert variable.numpy() == [rank]
    counts = tf.constant([3 * other for other in range(size)])
    blocks = np.arange(sum(range(size)) * 3.0)
    mine = slice(3 * sum(range(rank)), 3 * sum(range(rank + 1)))
    np.testing.assert_array_equal(dt.reduce_scatter(blocks, counts=counts), size * blocks[mine])
    # Other ranks than the root may have another number of rows.
    block = dt.scatter(blocks if rank == 0 else blocks[:0], counts=counts)
    np.testing.assert_array_equal(block, blocks[mine])


def test_static_shapes(rank: int, size: int) -> None:
    @tf.function(input_signature=[tf.TensorSpec([6, 2]), tf.TensorSpec([None]), tf.TensorSpec(None), tf.TensorSpec([])])
    def shapes(fixed: Any, partly: Any, unknown: Any, scalar: Any) -> Any:
        for function in (dt.allreduce, dt.reduce, dt.all_to_all):
            results = function([fixed, partly, unknown])
            assert [result.shape.rank for result in results] == [2, 1, None]
            assert results[0].shape == [6, 2]
        for function in (dt.all_gather, dt.gather, dt.scatter, dt.reduce_scatter):
            results = function([fixed, partly, unknown])
            assert [result.shape.rank for result in results] == [2, 1, None]
            assert results[0].shape.as_list() == [None, 2]
        assert dt.all_gather(scalar).shape.as_list() == [None]
        assert dt.all_gather(fixed, counts=[6] * size).shape == [6 * size, 2]
        received = dt.all_to_all(fixed, send_counts=[6] + [0] * (size - 1), receive_counts=[6 * (rank == 0)] * size)
        assert received.shape == [6 * size * (rank == 0), 2]
        return dt.allreduce([fixed, scalar]), received

    (total, number), received = shapes(tf.ones([6, 2]), tf.ones([6]), tf.ones([6]), 2.0)
    np.testing.assert_array_equal(total, np.full((6, 2), size))
    assert number.numpy() == 2 * size
    assert received.shape == [6 * size * (rank == 0), 2]


@pytest.mark.parametrize("compiled", [False, True])
def test_counts_of_the_result(compiled: bool, rank: int, size: int) -> None:
    rows = list(range(1, size + 1))

    def calls(x: Any, even: Any, spread: Any) -> Any:
        send = tf.fill([size], rank + 1)
        return [
            dt.all_gather(x, ragged=True, return_counts=True)[1],
            dt.all_gather(x, counts=rows, return_counts=True)[1],
            *dt.all_gather([x, x[:1]], ragged=True, return_counts=True)[1],
            *dt.all_gather([x[:1], x[:1]], return_counts=True)[1],
            dt.all_gather(3, return_counts=True)[1],
            dt.all_to_all(even, return_counts=True)[1],
            dt.all_to_all(spread, send_counts=send, receive_counts=rows, return_counts=True)[1],
            dt.all_to_all(spread, send_counts=send, return_counts=True)[1],
        ]

    found = (tf.function(calls) if compiled else calls)(
        tf.ones([rank + 1, 2]), tf.ones([2 * size]), tf.ones([(rank + 1) * size])
    )
    ones, twos = [1] * size, [2] * size
    assert [counts.numpy().tolist() for counts in found] == [rows, rows, rows, ones, ones, ones, ones, twos, rows, rows]


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_sparse_tensors(op: str, rank: int, size: int) -> None:
    def slices(rank: int) -> Any:
        indices = tf.range(rank + 1, dtype=tf.int64)
        return tf.IndexedSlices(tf.fill([rank + 1, 2], float(rank + 1)), indices, tf.constant([4, 2], tf.int64))

    expected = sum(tf.convert_to_tensor(slices(other)).numpy() for other in range(size)) / (size if op == "mean" else 1)
    for call in (dt.allreduce, tf.function(lambda x, op: dt.allreduce(x, op))):
        dense, sparse = call([tf.fill([2], float(rank)), slices(rank)], op)
        assert isinstance(sparse, tf.IndexedSlices)
        assert sparse.values.shape == [size * (size + 1) // 2, 2]
        np.testing.assert_allclose(tf.convert_to_tensor(sparse), expected, rtol=1e-6)
        np.testing.assert_allclose(dense, np.full(2, np.mean(range(size)) * (size if op == "sum" else 1)))
    dense = dt.allreduce(slices(rank), op, sparse_as_dense=True)
    np.testing.assert_allclose(dense, expected, rtol=1e-6)
    np.testing.assert_allclose(dt.allreduce(slices(rank), "max", sparse_as_dense=True).shape, [4, 2])
    with pytest.raises(mc.ArgumentError, match="sparse_as_dense"):
        dt.allreduce(slices(rank), "max")
    scaled = tf.convert_to_tensor(dt.allreduce(slices(rank), prescale=0.5))
    np.testing.assert_allclose(scaled, expected * (size if op == "mean" else 1) / 2, rtol=1e-6)


def test_sparse_tensors_have_gradients(rank: int, size: int) -> None:
    x = tf.Variable([[float(rank), 1.0]])
    with tf.GradientTape() as tape:
        sparse = dt.allreduce(tf.IndexedSlices(x, tf.constant([rank]), tf.constant([size, 2])), "mean")
        loss = (rank + 1.0) * tf.reduce_sum(tf.convert_to_tensor(sparse) ** 2)
    gradient = size * (size + 1) / 2 * 2 * np.array([[rank, 1.0]]) / size**2
    np.testing.assert_allclose(tape.gradient(loss, x), gradient, rtol=1e-6)


def test_a_graph_that_has_lost_its_group(rank: int, size: int) -> None:
    group = dt.Group(name="short")
    calls = [
        tf.function(lambda x, f=f: f(x, group=group), autograph=False) for f in (dt.allreduce, dt.reduce, dt.all_gather)
    ]
    for call in calls:
        call(tf.ones([1]))
    group.free()
    for call in calls:
        with pytest.raises(tf.errors.InvalidArgumentError, match="freed") as raised:
            call(tf.ones([1]))
        assert isinstance(mc.error_of(raised.value), mc.ArgumentError)
    assert dt.allreduce(1).numpy() == size


def test_a_loop(rank: int, size: int) -> None:
    @tf.function
    def repeated(x: Any) -> Any:
        _, last = tf.while_loop(
            lambda i, _: i < 5,
            lambda i, y: (
                i + 1,
                tf.ensure_shape(dt.reduce_scatter(dt.all_gather(y), "mean"), [1]) + dt.allreduce(y, "mean"),
            ),
            (0, x),
        )
        return last

    x = tf.Variable([float(rank)])
    with tf.GradientTape() as tape:
        y = repeated(x)
        loss = tf.reduce_sum(y) * (rank + 1.0)
    # a = the mean, b = own value: a' = 2 a, b' = a + b.
    mean = (size - 1) / 2
    np.testing.assert_allclose(y, [rank + mean * (2**5 - 1)], rtol=1e-6)
    # The gradient of y_r is 1 for its own x and 31 / size for each.
    expected = rank + 1 + 31 / size * sum(range(1, size + 1))
    np.testing.assert_allclose(tape.gradient(loss, x), [expected], rtol=1e-6)


def test_a_session_with_a_loop_and_a_barrier(rank: int, size: int) -> None:
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float64, [None])
        _, y = v1.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, dt.allreduce(y)), (0, x))
        barrier = dt.barrier()
        assert isinstance(barrier, tf.Operation)
        (gradient,) = tf.gradients(dt.all_gather(x * x) * (rank + 1.0), x)
        (through,) = tf.gradients(y, x)
        found, slope, through, _ = session.run([y, gradient, through, barrier], {x: [rank + 1.0]})
    np.testing.assert_allclose(found, [size**2 * size * (size + 1) / 2])
    np.testing.assert_allclose(slope, [2 * (rank + 1) * size * (size + 1) / 2])
    np.testing.assert_allclose(through, [size**3])


def test_a_barrier_in_a_function(rank: int, size: int) -> None:
    @tf.function
    def step(x: Any) -> Any:
        dt.barrier()
        return x + 1

    assert step(tf.constant(1.0)) == 2
    assert dt.barrier() is None


@pytest.mark.parametrize("call", [dt.allreduce, lambda x, op: dt.reduce(x, 0, op), dt.reduce_scatter])
def test_a_gradient_of_a_graph_that_is_not_there_is_an_error(call: Any, rank: int, size: int) -> None:
    with tf.Graph().as_default():
        x = tf.ones([size])
        y = call(x, "product")
        with pytest.raises(LookupError, match="'product' has no gradient"):
            tf.gradients(y, x)


def test_messages_have_no_gradient(rank: int, size: int) -> None:
    x = tf.Variable(2.0)
    with tf.GradientTape() as tape:
        dt.send(1.0, rank)
        y, _ = dt.recv(tf.zeros([], tf.float64), rank)
        z = y * tf.cast(x, tf.float64)
    assert tape.gradient(z, x) == 1
    with tf.GradientTape() as tape:
        y, _ = dt.sendrecv(x, rank, x)
    with pytest.raises(LookupError, match="all_to_all"):
        tape.gradient(y, x)


def test_bad_arguments_change_nothing(rank: int, size: int) -> None:
    x = tf.ones([4])
    for bad, error, text in [
        (lambda: dt.allreduce([None]), mc.ArgumentError, "None"),
        (lambda: dt.allreduce(np.ma.masked_array([1.0], [True])), mc.ArgumentError, "masked"),
        (lambda: dt.allreduce(x, name=3), mc.DTypeError, "invalid name"),
        (lambda: dt.allreduce([True], "min"), mc.DTypeError, "bool"),
        (lambda: dt.allreduce(tf.constant("text")), mc.DTypeError, "a tensor of string cannot be sent"),
        (lambda: dt.all_gather([x, tf.constant(["text"])]), mc.DTypeError, "a tensor of string cannot be sent"),
        (lambda: tf.function(dt.allreduce)(tf.constant("text")), mc.DTypeError, "a tensor of string cannot be sent"),
        (lambda: _ops.run("dl_comm_collective", [x], "1 0"), mc.ArgumentError, "invalid settings of an op: 1 0"),
        (
            lambda: dt.all_to_all(tf.ones([7]), send_counts=[1] * size, receive_counts=[1] * size),
            mc.ArgumentError,
            "have the sum",
        ),
    ]:
        with pytest.raises(error, match=text):
            bad()
    np.testing.assert_array_equal(dt.allreduce(x), np.full(4, size))


def test_integers_in_settings_are_exact() -> None:
    x = tf.ones([4])
    for group, text in [
        (2**53 + 1, f"group {2**53 + 1} was freed"),
        (1.5, "invalid settings"),
        (2**64, "invalid settings"),
    ]:
        with pytest.raises(mc.ArgumentError, match=text):
            _ops.run("dl_comm_collective", [x], f"1 0 {group} 0 1.0 1.0 1 -1.0\0name\0")
    with pytest.raises(mc.ArgumentError, match="invalid settings"):
        _ops.run("dl_comm_collective", [x], f"{2**32 + 1} 0 0 0 1.0 1.0 1 -1.0\0name\0")


@pytest.mark.parametrize("name", ["two words", "1 2\n3", "über"])
def test_settings_keep_any_name(name: str) -> None:
    with tf.Graph().as_default():
        op = dt.allreduce(tf.ones([2]), "sum", name=name, timeout=0.1, prescale=0.1).op
        assert _ops.settings_of(op) == ([1, 8, 0, 0, 0.1, 1, 0, 0.1], name)


def test_xla_is_refused(rank: int, size: int) -> None:
    with pytest.raises(mc.StateError, match="XLA"):
        tf.function(dt.all_gather, jit_compile=True)(tf.ones([2]))


def test_a_maximum_through_a_span_has_no_gradient(rank: int, size: int) -> None:
    mc.push_communicator(int(rank > 0))
    x = tf.ones(2)
    with mc.collective_span(0, 1), tf.GradientTape() as tape:
        tape.watch(x)
        y = dt.allreduce(x, "max")
    mc.pop_communicator()
    with pytest.raises(LookupError, match="no gradient"):
        tape.gradient(y, x)


def test_what_cannot_be_written_into(rank: int, size: int) -> None:
    x = tf.ones(3)
    for option in ({"out": x}, {"async_op": True}):
        with pytest.raises(mc.ArgumentError, match="returns new tensors"):
            mc.allreduce(x, **option)
    with pytest.raises(mc.ArgumentError, match="returns new tensors"):
        mc.broadcast([x], async_op=True)
    with pytest.raises(mc.DTypeError, match=r"use dl_comm\.tensorflow\.recv"):
        mc.recv(x, 0)
    assert mc.allreduce(tf.Variable(x), async_op=False).numpy().tolist() == [size] * 3


def test_threads_that_flush_subnormals_do_not_change_sums(rank: int, size: int) -> None:
    """Those of TensorFlow do: eagerly a call runs there, in a function on a thread of the core."""
    x = tf.constant(np.full(16, 0x116C2 * (rank + 1), np.uint32).view(np.float32))
    compiled = tf.function(lambda x: dt.allreduce(x, "sum"))
    for run in [lambda x: dt.allreduce(x, "sum"), compiled] * 10:
        bits = run(x)
        assert set(bits.numpy().view(np.uint32)) == {0x116C2 * (size * (size + 1) // 2)}


@pytest.mark.parametrize("nested", [False, True])
def test_calls_by_name_in_a_function_have_no_order(nested: bool, rank: int, size: int) -> None:
    names = list("abcd")[:: 1 if rank % 2 else -1]

    @tf.function
    def call(x: Any) -> Any:
        def found() -> dict[str, Any]:
            return {name: dt.allreduce(x * ord(name), name=name, by_name=True) for name in names}

        return tf.cond(x[0] > 0, found, lambda: dict.fromkeys(names, x)) if nested else found()

    for name, result in call(tf.ones(3)).items():
        np.testing.assert_array_equal(result, np.full(3, ord(name) * size))


def test_calls_by_name_that_differ_in_a_function(rank: int, size: int) -> None:
    if size == 1:
        pytest.skip("needs two ranks")

    @tf.function
    def call(x: Any) -> Any:
        return dt.allreduce(x, name="differs", by_name=True)

    with pytest.raises(tf.errors.FailedPreconditionError) as raised:
        call(tf.ones(3 + (rank == 0)))
    assert isinstance(mc.error_of(raised.value), mc.MismatchError)
    np.testing.assert_array_equal(call(tf.ones(2)), [size] * 2)
