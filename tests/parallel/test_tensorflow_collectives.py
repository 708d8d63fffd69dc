"""Every collective on tensors, on 1, 2 and 3 ranks: values, groups, gradients, graphs and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

import dl_comm as mc  # noqa: E402
import dl_comm.tensorflow as dt  # noqa: E402
from dl_comm.tensorflow import _ops  # noqa: E402

FLOATS = [tf.float16, tf.bfloat16, tf.float32, tf.float64]
INTEGERS = [tf.int8, tf.uint8, tf.int16, tf.uint16, tf.int32, tf.uint32, tf.int64, tf.uint64]
COMPLEX = [tf.complex64, tf.complex128]
ALL = [*FLOATS, *INTEGERS, *COMPLEX, tf.bool]
REDUCTIONS = {
    "sum": np.add.reduce,
    "product": np.multiply.reduce,
    "min": np.minimum.reduce,
    "max": np.maximum.reduce,
    "bit_and": np.bitwise_and.reduce,
    "bit_or": np.bitwise_or.reduce,
    "bit_xor": np.bitwise_xor.reduce,
}


def name_of(dtype: Any) -> str:
    return str(dtype.name)


def values(rank: int, shape: Any, dtype: Any = tf.float32) -> np.ndarray:
    """Small numbers, other ones on each rank."""
    numbers = (np.arange(int(np.prod(shape))) * 3 + rank) % 7 + 1
    return numbers.reshape(shape).astype(dtype.as_numpy_dtype)


def of_all(size: int, shape: Any, dtype: Any = tf.float32) -> np.ndarray:
    return np.stack([values(rank, shape, dtype) for rank in range(size)])


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    return tf.function(function, autograph=False)


def in_session(function: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a function of arrays as a TF1 graph."""

    def run(*arguments: Any) -> Any:
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            fed = [tf.compat.v1.placeholder(np.asarray(value).dtype, [None] * np.ndim(value)) for value in arguments]
            return session.run(function(*fed), dict(zip(fed, arguments, strict=True)))

    return run


MODES: dict[str, Callable[..., Any]] = {"eager": lambda function: function, "function": traced, "session": in_session}


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *COMPLEX], ids=name_of)
def test_reductions_of_every_type(dtype: Any, rank: int, size: int) -> None:
    operators = ["sum"] if dtype in COMPLEX else list(REDUCTIONS) if dtype in INTEGERS else list(REDUCTIONS)[:4]
    for op in operators:
        for length in (0, 1, 1000):
            mine = tf.constant(values(rank, (length,), dtype))
            expected = REDUCTIONS[op](of_all(size, (length,), dtype), dtype=dtype.as_numpy_dtype)
            found = dt.allreduce(mine, op)
            assert found.dtype == dtype
            np.testing.assert_array_equal(found, expected)
            np.testing.assert_array_equal(mine, values(rank, (length,), dtype))
            at_root = dt.reduce(mine, size - 1, op)
            np.testing.assert_array_equal(at_root, expected if rank == size - 1 else np.zeros_like(expected))
            blocks = np.repeat(values(rank, (length,), dtype), size)
            block = dt.reduce_scatter(blocks, op)
            expected = np.repeat(expected, size)[rank * length : (rank + 1) * length]
            np.testing.assert_array_equal(block, expected)


@pytest.mark.parametrize("dtype", ALL, ids=name_of)
def test_data_moves_in_every_type(dtype: Any, rank: int, size: int) -> None:
    for length in (0, 1, 100):
        mine = values(rank, (length, 2), dtype)
        joined = np.concatenate(list(of_all(size, (length, 2), dtype)))
        np.testing.assert_array_equal(dt.all_gather(mine), joined)
        root = length % size
        found = dt.gather(mine, root)
        np.testing.assert_array_equal(found, joined if rank == root else np.zeros((0, 2)))
        block = dt.scatter(joined if rank == root else np.zeros_like(joined), root)
        np.testing.assert_array_equal(block, mine)
        spread = np.concatenate([values(rank + 10 * other, (length,), dtype) for other in range(size)])
        expected = np.concatenate([values(other + 10 * rank, (length,), dtype) for other in range(size)])
        np.testing.assert_array_equal(dt.all_to_all(spread), expected)


def test_lists_numbers_factors_and_means(rank: int, size: int) -> None:
    total = size * (size - 1) // 2
    found = dt.allreduce([tf.fill([3], float(rank)), tf.fill([2, 2], 2 * rank), tf.zeros([0], tf.float64)])
    assert [tensor.shape.as_list() for tensor in found] == [[3], [2, 2], [0]]
    np.testing.assert_array_equal(found[0], np.full(3, total))
    np.testing.assert_array_equal(found[1], np.full((2, 2), 2 * total))
    for number, dtype in ((rank, tf.int64), (float(rank), tf.float64), (complex(rank), tf.complex128)):
        found = dt.allreduce(number)
        assert found.dtype == dtype
        assert found.shape == []
        assert found.numpy() == total
    assert dt.allreduce(rank == 0, "bit_or").numpy()
    third = 1 / 3  # not exact in float32
    scaled = dt.allreduce(tf.ones([2], tf.float64), prescale=third, postscale=5.0)
    np.testing.assert_allclose(scaled, np.full(2, size * 5 / 3), rtol=1e-15)
    np.testing.assert_array_equal(dt.allreduce(tf.constant([-1, -7]), "mean"), [-1, -7])
    np.testing.assert_allclose(dt.allreduce(tf.ones([5]), "adasum"), np.ones(5), rtol=1e-6)
    gathered = dt.all_gather([tf.fill([2, 3], rank), tf.constant(rank)])
    assert [tensor.shape.as_list() for tensor in gathered] == [[2 * size, 3], [size]]
    np.testing.assert_array_equal(dt.all_gather(rank), np.arange(size))
    variable = tf.Variable([float(rank)])
    assert dt.allreduce(variable).numpy() == [total]
    assert variable.numpy() == [rank]


@pytest.mark.parametrize("mode", MODES)
def test_blocks_of_different_lengths(mode: str, rank: int, size: int) -> None:
    counts = [3 * other for other in range(size)]
    joined = np.concatenate([values(other, (3 * other, 2)) for other in range(size)])
    mine = values(rank, (3 * rank, 2))
    sent = [other + 1 for other in range(size)]
    spread = np.concatenate([np.full(other + 1, 10 * rank + other) for other in range(size)])

    def run(mine: Any, joined: Any, spread: Any) -> list[Any]:
        return [
            dt.all_gather(mine, counts=counts),
            dt.all_gather(mine, ragged=True, name="other"),
            dt.gather(mine, size - 1, ragged=True),
            dt.scatter(joined if rank == 0 else joined[:0], counts=counts),
            dt.reduce_scatter(joined, counts=tf.constant(counts)),
            dt.all_to_all(spread, send_counts=sent),
            dt.all_to_all(spread, send_counts=sent, receive_counts=[rank + 1] * size),
            dt.all_gather(tf.reduce_sum(mine), ragged=True, name="of a scalar"),
        ]

    everywhere, same, at_root, block, reduced, received, again, sums = MODES[mode](run)(mine, joined, spread)
    for found in (everywhere, same):
        np.testing.assert_array_equal(found, joined)
    np.testing.assert_array_equal(at_root, joined if rank == size - 1 else joined[:0])
    np.testing.assert_array_equal(block, mine)
    np.testing.assert_array_equal(reduced, size * mine)
    for found in (received, again):
        np.testing.assert_array_equal(found, [10 * other + rank for other in range(size) for _ in range(rank + 1)])
    np.testing.assert_allclose(sums, [values(other, (3 * other, 2)).sum() for other in range(size)])


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


@pytest.mark.parametrize("mode", MODES)
def test_a_group_of_two(mode: str, rank: int, size: int) -> None:
    members = list(range(size))[-2:][::-1]
    if rank not in members:
        np.testing.assert_array_equal(dt.allreduce(tf.ones([2])), np.full(2, size))
        return
    with dt.Group(members) as group:

        def run(x: Any) -> list[Any]:
            return [
                dt.allreduce(x, "max", group=group),
                dt.all_gather(x, group=group),
                dt.broadcast([x], 0, group=group)[0],
                dt.reduce(x, 0, group=group),
                dt.gather(x, 0, group=group),
            ]

        highest, joined, spread, total, gathered = MODES[mode](run)(np.array([rank], np.int16))
        assert highest.dtype == tf.int16
        assert np.asarray(highest) == [size - 1]
        np.testing.assert_array_equal(joined, members)
        assert np.asarray(spread) == [members[0]]
        assert np.asarray(total) == [sum(members) if group.rank == 0 else 0]
        np.testing.assert_array_equal(gathered, members if group.rank == 0 else [])
        x = tf.Variable([float(rank)])
        with tf.GradientTape() as tape:
            y = dt.broadcast([x], 0, group=group)[0] ** 2 * (group.rank + 1.0)
        n = len(members)
        expected = 2 * rank * n * (n + 1) / 2 if group.rank == 0 else 0
        np.testing.assert_allclose(tape.gradient(y, x), [expected])
        dt.barrier(group=group)
    with pytest.raises(mc.ArgumentError, match="freed"):
        dt.allreduce(1, group=group)
    np.testing.assert_array_equal(dt.allreduce(tf.ones([2])), np.full(2, size))


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


# The functions of the gradient tests: of a matrix of `2 * size` rows, with results on every rank.
FUNCTIONS: dict[str, Callable[[Any, int, int], Any]] = {
    "allreduce sum": lambda x, rank, size: dt.allreduce(x),
    "allreduce mean": lambda x, rank, size: dt.allreduce(x, "mean"),
    "allreduce scaled": lambda x, rank, size: dt.allreduce(x, prescale=2.0, postscale=0.25),
    "allreduce max": lambda x, rank, size: dt.allreduce(x, "max"),
    "allreduce min": lambda x, rank, size: dt.allreduce(x, "min"),
    "reduce sum": lambda x, rank, size: dt.reduce(x, size - 1),
    "reduce mean": lambda x, rank, size: dt.reduce(x, 0, "mean"),
    "reduce min": lambda x, rank, size: dt.reduce(x, 0, "min"),
    "broadcast": lambda x, rank, size: dt.broadcast([x], size - 1)[0],
    "all_gather": lambda x, rank, size: dt.all_gather(x),
    "all_gather ragged": lambda x, rank, size: dt.all_gather(x[: rank + 1], ragged=True),
    "all_gather scalar": lambda x, rank, size: dt.all_gather(tf.reduce_sum(x)),
    "gather": lambda x, rank, size: dt.gather(x, size - 1),
    "gather list": lambda x, rank, size: tf.concat(dt.gather([x, 2 * x[:1]]), 0),
    "gather ragged": lambda x, rank, size: dt.gather(x[: rank + 1], ragged=True),
    "scatter": lambda x, rank, size: dt.scatter(x, size - 1),
    "scatter counts": lambda x, rank, size: dt.scatter(x, counts=[2 * size] + [0] * (size - 1)),
    "reduce_scatter": lambda x, rank, size: dt.reduce_scatter(x),
    "reduce_scatter mean": lambda x, rank, size: dt.reduce_scatter(x, "mean", counts=[2 * size] + [0] * (size - 1)),
    "reduce_scatter max": lambda x, rank, size: dt.reduce_scatter(x, "max"),
    "reduce_scatter scaled": lambda x, rank, size: dt.reduce_scatter(x, prescale=3.0),
    "all_to_all list": lambda x, rank, size: tf.concat(dt.all_to_all([x, x[size:] * x[size:]]), 0),
    "all_to_all": lambda x, rank, size: dt.all_to_all(x),
    "all_to_all counts": lambda x, rank, size: dt.all_to_all(x, send_counts=[0] * (size - 1) + [2 * size]),
}


def scalar_loss(function: Callable[[Any, int, int], Any], x: Any, rank: int, size: int) -> Any:
    """A loss whose first and second derivatives depend on rank and position."""
    y = function(x, rank, size)
    weights = tf.reshape(tf.range(1, tf.size(y) + 1), tf.shape(y))
    return tf.reduce_sum(tf.cast(weights, y.dtype) * (y**3 + y)) * (rank + 1.0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_and_gradients_of_gradients(name: str, rank: int, size: int) -> None:
    """Against differences of the sum of all ranks' losses."""
    function = FUNCTIONS[name]
    start = np.random.default_rng(rank).permutation(4 * size).reshape(2 * size, 2) / (4 * size) + rank / 16 + 0.1
    direction = np.random.default_rng(10 + rank).normal(size=start.shape)

    def first(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = scalar_loss(function, x, rank, size)
        return tape.gradient(loss, x)

    def second(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            slope = tf.reduce_sum(first(x) * direction)
        return tape.gradient(slope, x)

    step = 1e-5
    total = tf.function(lambda x: dt.allreduce(scalar_loss(function, x, rank, size)), autograph=False)
    eager, graph = first(tf.constant(start)), tf.function(first, autograph=False)
    np.testing.assert_allclose(graph(tf.constant(start)), eager, rtol=1e-12)
    ahead, behind = (tf.constant(start + sign * step * direction) for sign in (1, -1))
    along = dt.allreduce(tf.reduce_sum(eager * direction))
    np.testing.assert_allclose(along, (total(ahead) - total(behind)) / (2 * step), rtol=1e-5)
    curved = tf.function(second, autograph=False)(tf.constant(start))
    np.testing.assert_allclose(curved, (graph(ahead) - graph(behind)) / (2 * step), rtol=1e-4, atol=1e-4)


def test_ties_share_the_gradient_of_a_maximum(rank: int, size: int) -> None:
    x = tf.Variable([1.0, float(rank)])
    with tf.GradientTape() as tape:
        y = dt.allreduce(x, "max")
    np.testing.assert_allclose(tape.gradient(y, x), [1.0, size if rank == size - 1 else 0.0])


@pytest.mark.parametrize("call", [dt.allreduce, lambda x, op: dt.reduce(x, 0, op), dt.reduce_scatter])
def test_a_gradient_that_is_not_there_is_an_error(call: Any, rank: int, size: int) -> None:
    x = tf.Variable(tf.ones([size]))
    with tf.GradientTape() as tape:
        y = call(x, "product")
    with pytest.raises(LookupError, match="'product' has no gradient"):
        tape.gradient(y, x)
    with tf.Graph().as_default():
        x = tf.ones([size])
        y = call(x, "product")
        with pytest.raises(LookupError, match="'product' has no gradient"):
            tf.gradients(y, x)


def test_integers_have_no_gradient_and_are_not_in_the_way(rank: int, size: int) -> None:
    x = tf.Variable([2.0])
    with tf.GradientTape() as tape:
        y, _ = dt.allreduce([x, tf.constant([rank])])
        unused, z = dt.all_gather([x, x * x])
        loss = y + tf.reduce_sum(z)
        del unused
    np.testing.assert_allclose(tape.gradient(loss, x), [size + 4.0 * size])


@pytest.mark.parametrize("mode", MODES)
def test_messages(mode: str, rank: int, size: int) -> None:
    following, before = (rank + 1) % size, (rank - 1) % size

    def run(short: Any, long: Any) -> list[Any]:
        sent = [short, tf.cast(short, tf.int16)]
        (floats, integers), status = dt.sendrecv(sent, following, [tf.zeros_like(tensor) for tensor in sent], before)
        assert floats.shape.rank == 1
        ring, about = dt.sendrecv(long, following, -tf.ones([100_001]), send_tag=3, recv_tag=3)
        return [floats, integers, status.source, status.bytes, ring, about.source, about.tag]

    numbers = np.arange(3.0) + rank
    found = MODES[mode](run)(numbers, np.full(100_000, float(rank), np.float32))
    floats, integers, source, length, ring, source_of_ring, tag = map(np.asarray, found)
    np.testing.assert_array_equal(floats, np.arange(3.0) + before)
    np.testing.assert_array_equal(integers, np.arange(3) + before)
    assert (source, length, source_of_ring, tag) == (before, 3 * 8 + 3 * 2, before, 3)
    assert (ring[:-1] == before).all()
    assert ring[-1] == -1


def test_a_send_and_a_receive(rank: int, size: int) -> None:
    if rank > 0:
        assert dt.send(tf.constant(rank), 0, tag=7) is None
    else:
        found = [dt.recv(tf.zeros([], tf.int32), tag=7) for _ in range(1, size)]
        assert sorted(int(status.source) for _, status in found) == list(range(1, size))
        assert all(int(tensor) == int(status.source) for tensor, status in found)
        with pytest.raises(mc.TimeoutError):
            dt.recv(1.0, timeout=0.1)
    dt.barrier()
    dt.send(1.0, rank)
    x = tf.Variable(2.0)
    with tf.GradientTape() as tape:
        y, _ = dt.recv(tf.zeros([], tf.float64), rank)
        z = y * tf.cast(x, tf.float64)
    assert tape.gradient(z, x) == 1
    for error, bad in (
        (mc.ArgumentError, lambda: dt.send(1.0, -1)),
        (mc.ArgumentError, lambda: dt.recv(1.0, tag=-3)),
        (mc.ArgumentError, lambda: dt.send(1.0, size)),
    ):
        with pytest.raises(error):
            bad()
    with tf.GradientTape() as tape:
        y, _ = dt.sendrecv(x, rank, x)
    with pytest.raises(LookupError, match="all_to_all"):
        tape.gradient(y, x)


def test_bad_arguments_change_nothing(rank: int, size: int) -> None:
    x = tf.ones([4])
    for bad, error, text in [
        (lambda: dt.allreduce(x, "avg"), mc.ArgumentError, "invalid op"),
        (lambda: dt.allreduce(x, "max", prescale=2.0), mc.ArgumentError, "factors of a sum"),
        (lambda: dt.allreduce([]), mc.ArgumentError, "empty"),
        (lambda: dt.allreduce([None]), mc.ArgumentError, "None"),
        (lambda: dt.allreduce(np.ma.masked_array([1.0], [True])), mc.ArgumentError, "masked"),
        (lambda: dt.allreduce(x, group=3), mc.ArgumentError, "invalid group"),
        (lambda: dt.allreduce(x, timeout=-1), mc.ArgumentError, "invalid timeout"),
        (lambda: dt.allreduce(x, name=3), mc.DTypeError, "invalid name"),
        (lambda: dt.reduce(x, -1), mc.ArgumentError, "root -1"),
        (lambda: dt.all_to_all(x, receive_counts=[1] * size), mc.ArgumentError, "send_counts"),
        (lambda: dt.all_gather([x, x], ragged=True), mc.ArgumentError, "one array"),
        (lambda: dt.allreduce("text"), mc.DTypeError, "string"),
        (lambda: dt.allreduce(tf.constant("text")), mc.DTypeError, "a tensor of string cannot be sent"),
        (lambda: dt.all_gather([x, tf.constant(["text"])]), mc.DTypeError, "a tensor of string cannot be sent"),
        (lambda: tf.function(dt.allreduce)(tf.constant("text")), mc.DTypeError, "a tensor of string cannot be sent"),
        (lambda: _ops.run("dl_comm_collective", [x], "1 0"), mc.ArgumentError, "invalid settings of an op: 1 0"),
        (lambda: dt.allreduce(None), mc.DTypeError, "NoneType"),
        (lambda: dt.allreduce(object()), mc.DTypeError, "object"),
        (lambda: dt.reduce(x, size), mc.ArgumentError, f"root {size} is not a rank"),
        (lambda: dt.allreduce([True], "min"), mc.DTypeError, "bool"),
        (lambda: dt.all_gather(x, counts=[4] * (size + 1)), mc.ArgumentError, "one for each rank"),
        (lambda: dt.all_gather(x, counts=[5] * size), mc.ArgumentError, "ask for 5 rows"),
        (lambda: dt.reduce_scatter(x, counts=[-1] * size), mc.ArgumentError, "invalid counts"),
        (lambda: dt.reduce_scatter(2.0), mc.ArgumentError, "scalar|rank 0|at least rank 1"),
        (lambda: dt.scatter(tf.ones([7]), counts=[3] * size), mc.ArgumentError, "ask for"),
        (lambda: dt.all_to_all(tf.ones([7]), send_counts=[1] * size, receive_counts=[1] * size), Exception, "ask for"),
    ]:
        if text == "ask for" and rank > 0:
            continue  # only the root of a scatter reads; the others would wait
        with pytest.raises(error, match=text):
            bad()
    if size > 1:
        with pytest.raises(mc.ArgumentError, match="multiple of the"):
            dt.reduce_scatter(tf.ones([size + 1]))
    np.testing.assert_array_equal(dt.allreduce(x), np.full(4, size))


@pytest.mark.parametrize("name", ["two words", "1 2\n3", "über"])
def test_settings_keep_any_name(name: str) -> None:
    with tf.Graph().as_default():
        op = dt.allreduce(tf.ones([2]), "sum", name=name, timeout=0.1, prescale=0.1).op
        assert _ops.settings_of(op) == ([1, 8, 0, 0, 0.1, 1, 0, 0.1], name)


def other_collectives(odd: bool) -> Any:
    return (dt.allreduce if odd else dt.reduce)(tf.ones([2]), name="same")


@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize(
    "call",
    [
        lambda odd: dt.allreduce(tf.ones([3 if odd else 2])),
        lambda odd: dt.allreduce(tf.ones([2]), "max" if odd else "min"),
        lambda odd: dt.all_gather(tf.ones([3 if odd else 2, 2])),
        lambda odd: dt.reduce(tf.ones([2]), 1 if odd else 0),
        lambda odd: dt.gather(tf.ones([2], tf.float64 if odd else tf.int64)),
        other_collectives,
    ],
    ids=["shape", "operator", "rows", "root", "type", "collective"],
)
def test_calls_that_differ_fail_everywhere_and_the_next_one_works(call: Any, mode: str, rank: int, size: int) -> None:
    if size == 1 or (mode == "function" and call is other_collectives):
        pytest.skip("needs two ranks, and takes seconds")
    odd = rank == size - 1
    with pytest.raises(mc.MismatchError if mode == "eager" else tf.errors.InvalidArgumentError) as raised:
        MODES[mode](lambda: call(odd))()
    assert isinstance(mc.error_of(raised.value), mc.MismatchError)
    assert dt.allreduce(1).numpy() == size


def test_xla_is_refused(rank: int, size: int) -> None:
    with pytest.raises(mc.StateError, match="XLA"):
        tf.function(dt.all_gather, jit_compile=True)(tf.ones([2]))


def test_large_results_use_memory_again(rank: int, size: int) -> None:
    given = tf.fill([3 << 10, 1 << 10], float(rank))
    places = set()
    for step in range(6):
        results = [dt.gradients([given], 0)[0], dt.allreduce(given), dt.all_gather(given)]
        arrays = [np.asarray(result) for result in results]
        assert (arrays[0] == (size - 1) / 2).all()
        assert (arrays[1] == size * (size - 1) / 2).all()
        assert (arrays[2].reshape(size, -1) == np.arange(size).reshape(size, 1)).all()
        if step > 1:
            places |= {array.ctypes.data for array in arrays}
        del results, arrays
    assert len(places) <= 6, "three results are alive at once"
    # Results that stay, and arrays in their memory, are not used again.
    kept = [np.asarray(dt.allreduce(given * step)) for step in range(4)]
    assert all((array == step * size * (size - 1) / 2).all() for step, array in enumerate(kept))


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("cartesian", [None, False])
def test_an_allreduce_goes_through_a_span(rank: int, size: int, cartesian: bool | None, in_graph: bool) -> None:
    mc.push_communicator(int(rank > 0), cartesian=cartesian)
    total = size * (size + 1) / 2

    def run() -> list[tf.Tensor]:
        x = (rank + 1) * tf.ones(5, tf.float64)
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = dt.allreduce(x)
                loss = (rank + 1) * tf.reduce_sum(y * y)
            gradient = inner.gradient(loss, x)
        second = outer.gradient(gradient, x)
        half = dt.allreduce(tf.fill([3], tf.constant(3e4, tf.float16)), "mean")
        scaled = dt.allreduce(tf.ones(2), prescale=2.0, postscale=0.5)
        mixed = [tf.fill([3], rank), tf.fill([2], rank + 0.5)]
        with tf.GradientTape() as tape:
            tape.watch(mixed[1])
            sums = dt.allreduce(mixed)
        of_floats = tape.gradient(sums[1], mixed[1])
        most = dt.allreduce(tf.constant(rank), "max")
        return [y, gradient, second, half, scaled, sums[0], of_floats, most]

    with mc.collective_span(0, 1):
        found = [each.numpy().tolist() for each in (tf.function(run) if in_graph else run)()]
        for wrong in ((3, "mean"), (tf.ones(2), "adasum")):
            with pytest.raises(mc.ArgumentError, match="flat"):
                dt.allreduce(*wrong)
        x = tf.ones(2)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = dt.allreduce(x, "max")
        with pytest.raises(LookupError, match="no gradient"):
            tape.gradient(y, x)
    mc.pop_communicator()
    integers, floats = sum(range(size)), [size] * 2
    expected = [[total] * 5, [2 * total**2] * 5, [2 * total * size] * 5, [3e4] * 3, floats, [integers] * 3, floats]
    assert found == [*expected, size - 1]


def test_calls_without_a_group_follow_the_communicators(rank: int, size: int) -> None:
    mc.push_communicator(rank % 2)
    with mc.set_communicator(1):
        assert dt.allreduce(tf.ones(3)).numpy().tolist() == [len(range(rank % 2, size, 2))] * 3
    mc.pop_communicator()
    assert dt.allreduce(tf.ones(3)).numpy().tolist() == [size] * 3


@pytest.mark.parametrize("mode", MODES)
def test_the_package_takes_tensors(rank: int, size: int, mode: str) -> None:
    """Calls of `dl_comm` are those of `dl_comm.tensorflow`."""
    x = values(rank, (2 * size, 3))
    calls: dict[str, dict[str, Any]] = {
        "allreduce": {"op": "max"},
        "reduce": {"root": size - 1},
        "all_gather": {"ragged": True},
        "gather": {"root": 0},
        "scatter": {"root": 0},
        "reduce_scatter": {"postscale": 0.5},
        "all_to_all": {},
    }
    for name, options in calls.items():
        found, expected = (
            MODES[mode](lambda x, module=module: getattr(module, name)(tf.identity(x), **options))(x)  # noqa: B023
            for module in (mc, dt)
        )
        assert np.array_equal(found, expected), name


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
