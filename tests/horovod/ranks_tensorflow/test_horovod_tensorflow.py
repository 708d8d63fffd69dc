"""Collectives of `horovod.tensorflow`: eager, in functions and in TF1 graphs; gradients, errors, optimizers, tapes."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow as hvd

REDUCED = [tf.uint8, tf.int8, tf.int32, tf.int64, tf.float16, tf.bfloat16, tf.float32, tf.float64]
MOVED = [*REDUCED, tf.int16, tf.uint16, tf.bool]
Run = Callable[[Callable[..., Any]], Any]


def in_session(call: Callable[..., Any], *arrays: Any) -> Any:
    """Builds the call in a TF1 graph, and runs it."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        fed = [tf.compat.v1.placeholder(tf.as_dtype(np.asarray(array).dtype)) for array in arrays]
        made = call(*fed)
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(tf.compat.v1.local_variables_initializer())
        return session.run(made, dict(zip(fed, arrays, strict=True)))


RUNS: dict[str, Callable[..., Any]] = {
    "eager": lambda call, *arrays: tf.nest.map_structure(np.asarray, call(*map(tf.constant, arrays))),
    "function": lambda call, *arrays: tf.nest.map_structure(np.asarray, tf.function(call)(*map(tf.constant, arrays))),
    "session": in_session,
}


@pytest.fixture(params=RUNS)
def run(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """A way to run a function of tensors."""
    return RUNS[request.param]


@pytest.fixture
def lower(size: int) -> Iterator[hvd.ProcessSet]:
    """A process set of the ranks but the last."""
    if size == 1:
        pytest.skip("needs two ranks")
    added = hvd.add_process_set(range(size - 1))
    yield added
    hvd.remove_process_set(added)


def of(rank: int, dtype: tf.DType = tf.float32, shape: tuple[int, ...] = (3, 4)) -> np.ndarray:
    """The array of a rank: small integers, exact in every type."""
    return (np.arange(np.prod(shape)).reshape(shape) % 5 + rank).astype(dtype.as_numpy_dtype)


@pytest.mark.parametrize("dtype", REDUCED, ids=lambda dtype: dtype.name)
def test_allreduce(rank: int, size: int, dtype: tf.DType, run: Run) -> None:
    def call(x: tf.Tensor) -> Any:
        return [
            hvd.allreduce(x, op=hvd.Sum),
            hvd.allreduce(x, op=hvd.Max, name="largest"),
            hvd.allreduce(x, op=hvd.Min),
            *hvd.grouped_allreduce([x, x[0]], op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5),
        ]

    total = np.sum([of(other, dtype).astype(float) for other in range(size)], 0)
    found = run(call, of(rank, dtype))
    for result, expected in zip(found, [total, of(size - 1, dtype), of(0, dtype), total, total[0]], strict=True):
        assert result.dtype == dtype.as_numpy_dtype
        np.testing.assert_array_equal(result.astype(float), expected.astype(float))


@pytest.mark.parametrize("dtype", MOVED, ids=lambda dtype: dtype.name)
def test_gather_broadcast_and_alltoall(rank: int, size: int, dtype: tf.DType, run: Run) -> None:
    def call(x: tf.Tensor) -> Any:
        one_each = tf.concat([x[:1]] * size, 0)
        rows, counts = hvd.alltoall(one_each, [1] * size)
        return [
            hvd.allgather(x),
            *hvd.grouped_allgather([x, x[:1]]),
            hvd.broadcast(x[:1], size - 1),
            hvd.alltoall(one_each),
            rows,
            counts,
        ]

    x = np.full((rank + 1, 2), rank, dtype.as_numpy_dtype)
    joined = np.concatenate([np.full((other + 1, 2), other, x.dtype) for other in range(size)])
    firsts = np.concatenate([np.full((1, 2), other, x.dtype) for other in range(size)])
    expected = [joined, joined, firsts, firsts[-1:], firsts, firsts, np.ones(size, np.int32)]
    for result, wanted in zip(run(call, x), expected, strict=True):
        assert result.dtype == wanted.dtype
        np.testing.assert_array_equal(result, wanted)


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average])
def test_reducescatter_gives_the_first_ranks_one_row_more(rank: int, size: int, op: int, run: Run) -> None:
    rows = 2 * size + 1
    x = of(rank, shape=(rows, 2))
    total = np.sum([of(other, shape=(rows, 2)) for other in range(size)], 0) / (size if op == hvd.Average else 1)
    begin = 0 if rank == 0 else 2 * rank + 1
    mine = total[begin : begin + 2 + (rank == 0)]
    one, two = run(lambda x: [hvd.reducescatter(x, op=op), hvd.grouped_reducescatter([x, x], op=op)[1]], x)
    np.testing.assert_allclose(one, mine, rtol=1e-6)
    np.testing.assert_allclose(two, mine, rtol=1e-6)


def gradient_of(call: Callable[[tf.Tensor], Any]) -> Callable[..., Any]:
    def gradient(x: tf.Tensor, dy: tf.Tensor) -> Any:
        if not tf.executing_eagerly() and not tf.compat.v1.get_default_graph().building_function:
            return tf.gradients(call(x), x, dy)[0]
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = call(x)
        return tape.gradient(y, x, dy)

    return gradient


def test_gradients(rank: int, size: int, run: Run) -> None:
    ranks = range(size)
    x = of(rank, tf.float64, (rank + 1, 2))
    rows = size * (size + 1) // 2
    begin = rank * (rank + 1) // 2
    upstream = of(rank, tf.float64, (rows, 2))
    mean = np.mean([of(other, tf.float64, (rows, 2)) for other in ranks], 0)
    found = run(gradient_of(hvd.allgather), x, upstream)
    np.testing.assert_allclose(found, mean[begin : begin + rank + 1])

    same, root = of(rank, tf.float64, (2 * size, 2)), size - 1
    means = np.mean([of(other, tf.float64, (2 * size, 2)) for other in ranks], 0)
    # Of a known shape, too: in a graph the zeros then need nothing of the call.
    for known in (tf.identity, lambda x: tf.ensure_shape(x, same.shape)):
        found = run(gradient_of(lambda x, known=known: hvd.broadcast(known(x), root)), same, same)
        np.testing.assert_allclose(found, means if rank == root else means * 0)
    for op in (hvd.Sum, hvd.Average, hvd.Max):
        found = run(gradient_of(lambda x, op=op: hvd.allreduce(x, op=op)), same, same)
        expected = {hvd.Sum: means * size, hvd.Average: means, hvd.Max: of(root, tf.float64, (2 * size, 2))}[op]
        np.testing.assert_allclose(found, expected)
    blocks = np.concatenate([of(other, tf.float64, (2, 2)) for other in ranks])
    for op, factor in ((hvd.Sum, size), (hvd.Average, 1)):
        call = gradient_of(lambda x, op=op: hvd.reducescatter(x, op=op, prescale_factor=0.5))
        np.testing.assert_allclose(run(call, same, of(rank, tf.float64, (2, 2))), blocks * factor * 0.5)
    # A row for each rank, and one that is not sent.
    longer = of(rank, tf.float64, (size + 1, 2))
    call = gradient_of(lambda x: hvd.alltoall(x, tf.ones(size, tf.int32))[0])
    back = run(call, longer, np.full((size, 2), float(rank)))
    expected = np.concatenate([np.repeat(np.arange(float(size))[:, np.newaxis], 2, 1), np.zeros((1, 2))])
    np.testing.assert_allclose(back, expected)


def test_calls_match_by_name_in_any_order(rank: int, size: int, run: Run) -> None:
    def call(x: tf.Tensor) -> Any:
        names = list("abcd")[:: 1 if rank % 2 else -1]
        found = {name: hvd.allreduce(x + ord(name), op=hvd.Sum, name=name) for name in names}
        return [found[name] for name in "abcd"]

    if run is RUNS["eager"]:
        pytest.skip("eager calls wait")
    for name, result in zip("abcd", run(call, np.zeros(3)), strict=True):
        np.testing.assert_array_equal(result, np.full(3, float(ord(name) * size)))


@pytest.mark.parametrize("what", ["shape", "dtype", "root", "operation"])
def test_ranks_that_differ_fail_at_once_and_the_next_call_works(rank: int, size: int, what: str, run: Run) -> None:
    if size == 1:
        pytest.skip("needs two ranks")

    def call(x: tf.Tensor) -> Any:
        if what == "root":
            return hvd.broadcast(x, 1 if odd else 0)
        if what == "operation":
            return hvd.allreduce(x, op=hvd.Max if odd else hvd.Min)
        return hvd.allreduce(x)

    odd = rank == size - 1
    x = np.ones(3 + (odd and what == "shape"), np.int32 if odd and what == "dtype" else np.float32)
    begin = time.monotonic()
    with pytest.raises(tf.errors.FailedPreconditionError):
        run(call, x)
    assert time.monotonic() - begin < 20  # two seconds on a machine with nothing else to do
    assert run(lambda x: hvd.allreduce(x, op=hvd.Sum), np.ones(())) == size


def test_wrong_arguments(size: int, run: Run) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError):
        run(lambda x: hvd.alltoall(x, [size + 5] + [0] * (size - 1))[0], np.ones(size))
    if size > 1:
        with pytest.raises(tf.errors.InvalidArgumentError):
            run(hvd.alltoall, np.ones(size + 1))
    slices = tf.IndexedSlices(tf.ones((1, 3)), tf.constant([0]), tf.constant([4, 3]))
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        with pytest.raises(NotImplementedError):
            hvd.allreduce(slices, op=op)
    with pytest.raises(NotImplementedError):
        hvd.allreduce(slices, prescale_factor=0.5)
    other = hvd.ProcessSet([0])
    other.process_set_id = 1000
    with pytest.raises(ValueError, match="Process set does not exist"):
        hvd.allreduce(tf.ones(3), process_set=other)


def test_process_sets(rank: int, size: int, lower: hvd.ProcessSet, run: Run) -> None:
    def call(x: tf.Tensor) -> Any:
        return [hvd.allreduce(x, op=hvd.Sum, process_set=lower), hvd.allgather(x[tf.newaxis], process_set=lower)]

    if rank == size - 1:
        with pytest.raises(tf.errors.InvalidArgumentError, match="is not in process set"):
            run(call, np.float64(rank))
    else:
        total, joined = run(call, np.float64(rank))
        assert total == sum(range(size - 1))
        assert list(joined) == list(range(size - 1))


def test_numbers_that_a_graph_reads(rank: int, size: int, run: Run) -> None:
    def call() -> Any:
        return [hvd.rank_op(), hvd.size_op(), hvd.process_set_included_op(), hvd.process_set_included_op(1000)]

    assert [int(each) for each in run(call)] == [rank, size, 1, -3]


def test_slices(rank: int, size: int, run: Run) -> None:
    def call(x: tf.Tensor) -> Any:
        slices = tf.IndexedSlices(x, tf.range(rank + 1), tf.constant([size, 2]))
        found = hvd.grouped_allreduce([slices, x[0]])
        return [tf.convert_to_tensor(found[0]), found[1]]

    rows, mean = run(call, np.full((rank + 1, 2), rank + 1.0))
    np.testing.assert_allclose(mean, [(size + 1) / 2] * 2)
    expected = [sum(other + 1 for other in range(row, size)) / size for row in range(size)]
    np.testing.assert_allclose(rows, np.repeat(np.array(expected)[:, np.newaxis], 2, 1))


def test_broadcast_of_variables_and_objects(rank: int, size: int) -> None:
    variables = [tf.Variable(tf.fill([2], float(rank))), tf.Variable(rank)]
    assert hvd.broadcast_variables(variables, size - 1) is None
    assert [list(variables[0].numpy()), variables[1].numpy()] == [[size - 1.0] * 2, size - 1]
    (value,) = hvd.broadcast_([tf.Variable(float(rank))], 0)
    assert value == 0
    assert hvd.broadcast_object({"rank": rank}, 0) == {"rank": 0}
    assert hvd.allgather_object(rank) == list(range(size))

    def build() -> Any:
        variable = tf.compat.v1.get_variable("x", initializer=float(rank + 1))
        with tf.control_dependencies([tf.compat.v1.global_variables_initializer()]):
            hook = hvd.broadcast_global_variables(0)
        with tf.control_dependencies([hook]):
            return variable.read_value()

    assert in_session(build) == 1
    with pytest.raises(RuntimeError, match="eager"):
        hvd.broadcast_global_variables(0)


@pytest.mark.parametrize(
    "options", [{}, {"groups": 1}, {"compression": hvd.Compression.fp16}, {"op": hvd.Sum}], ids=str
)
@pytest.mark.parametrize("compiled", [False, True])
def test_tape(rank: int, size: int, options: dict[str, Any], compiled: bool) -> None:
    variables = [tf.Variable([1.0, 2.0]), tf.Variable(3.0), tf.Variable(1.0)]

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variables[0] * float(rank)) + variables[1] * float(rank)
        tape = hvd.DistributedGradientTape(tape, **options)
        tape.register_local_source(variables[1])
        return tape.gradient(loss, variables, unconnected_gradients=tf.UnconnectedGradients.NONE)[:2]

    first, local = (tf.function(step) if compiled else step)()
    total = sum(range(size))
    np.testing.assert_allclose(first, [total if options.get("op") == hvd.Sum else total / size] * 2)
    np.testing.assert_allclose(local, rank / size)


def test_functions_are_pickled_by_name() -> None:
    import horovod.keras
    import horovod.tensorflow.keras

    for module in (hvd, horovod.keras, horovod.tensorflow.keras):
        for name in ("allreduce", "broadcast", "broadcast_object", "DistributedGradientTape", "DistributedOptimizer"):
            function = getattr(module, name, None)
            assert function is None or pickle.loads(pickle.dumps(function)) is function


@pytest.mark.parametrize("threshold", [0, 40, 200])
def test_the_fusion_threshold(threshold: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from horovod.tensorflow.gradient_aggregation import Reducer

    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", str(threshold))
    reducer = Reducer("test", "", "", hvd.Compression.none, False, hvd.Average, 1.0)
    with tf.Graph().as_default():
        grads = [tf.zeros(length // 4) for length in (128, 32, 32, 4)]  # bytes; the last ones are ready first
        parts = reducer.fused([0, 1, 2, 3], grads)
    assert parts == {0: [[3], [2], [1], [0]], 40: [[3, 2], [1], [0]], 200: [[3, 2, 1, 0]]}[threshold]


def test_optimizer_of_tf1_with_several_passes(rank: int, size: int) -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.compat.v1.get_variable("x", initializer=[0.0], use_resource=True)
        step = tf.compat.v1.train.get_or_create_global_step()
        optimizer = hvd.DistributedOptimizer(
            tf.compat.v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=2
        )
        update = optimizer.minimize(tf.reduce_sum(x * float(rank)), global_step=step)
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(tf.compat.v1.local_variables_initializer())
        values = []
        for _ in range(5):
            session.run(update)
            values.append(float(session.run(x)[0]))
        mean = 2 * sum(range(size)) / size
        assert values == [0, -mean, -mean, -2 * mean, -2 * mean]
        assert session.run(step) == 5


def test_hook_of_a_monitored_session(rank: int) -> None:
    with tf.Graph().as_default():
        x = tf.compat.v1.get_variable("x", initializer=float(rank + 5))
        tf.compat.v1.train.get_or_create_global_step()
        hooks = [hvd.BroadcastGlobalVariablesHook(0)]
        with tf.compat.v1.train.MonitoredTrainingSession(hooks=hooks) as session:
            assert session.run(x) == 5


def test_join(rank: int, size: int, run: Run) -> None:
    for _ in range(rank):
        assert run(lambda x: hvd.allreduce(x, op=hvd.Sum, name="joined"), np.ones(())) >= 1
    assert 0 <= int(run(hvd.join)) < size
