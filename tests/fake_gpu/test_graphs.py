"""Calls that are captured into GPU graphs; run on 1 to 3 ranks by test_device.py.

With NCCL the graph has the calls, and each replay gives what a call gives; on other paths they are refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from arrays import Array, Graph, Stream, use

import dl_comm
from device_calls import DeviceWork

GPUS = int(os.environ.get("FAKE_CUDA_DEVICES", "1"))
ON_NCCL = os.environ["PATH_EXPECTED"] == "nccl"
MISMATCH = -4  # DL_COMM_ERROR_MISMATCH
ALLREDUCE, ALLGATHER, REDUCE_SCATTER, ALLTOALL = 1, 5, 8, 9
FLOAT32 = 2


@pytest.fixture(scope="module", autouse=True)
def job() -> Iterator[None]:
    dl_comm.init()
    use(dl_comm.local_rank() % GPUS)
    dl_comm.gradients([Array(np.ones(4, "f4"), Stream())])  # chooses the path
    yield
    dl_comm.finalize()


nccl_only = pytest.mark.skipif(not ON_NCCL, reason="graphs need NCCL")


def captured(stream: Stream, call: Callable[[], None]) -> Graph:
    stream.capture(True)
    call()
    return Graph(stream)


@nccl_only
@pytest.mark.parametrize(("count", "length", "replays"), [(1, 10, 100), (1, 600_000, 100), (20, 100, 25), (200, 3, 2)])
def test_replays_equal_as_many_calls(count: int, length: int, replays: int) -> None:
    rank, stream = dl_comm.rank(), Stream()

    def values(turn: int) -> list[np.ndarray]:
        random = np.random.default_rng([rank, turn, length])
        return [random.standard_normal(length + index).astype("f4") for index in range(count)]

    given = [Array(each, stream) for each in values(0)]
    got = [Array(np.zeros_like(each), stream) for each in values(0)]
    eager = [Array(np.zeros_like(each), stream) for each in values(0)]
    graph = captured(stream, lambda: dl_comm.gradients(given, out=got))
    assert all((each.get() == 0).all() for each in got), "a capture runs nothing"
    for turn in range(replays):
        for array, data in zip(given, values(turn), strict=True):
            array.put(data)
        graph.launch(stream)
        # Between replays the group goes on as always.
        dl_comm.gradients(given, out=eager)
        if turn % 25 in (1, 24):
            for one, other in zip(got, eager, strict=True):
                assert one.get().tobytes() == other.get().tobytes(), turn
    graph.destroy()


@nccl_only
def test_other_collectives_and_several_calls_in_a_graph() -> None:
    rank, size, stream, length = dl_comm.rank(), dl_comm.size(), Stream(), 1000
    use_on = (dl_comm.local_rank() % GPUS, stream.handle.value)
    block, whole = Array(np.zeros(length, "f4"), stream), Array(np.zeros(size * length, "f4"), stream)
    turned = Array(np.zeros(size * length, "f4"), stream)

    def call(collective: int, source: Array, target: Array, count: int) -> None:
        lists = [(source.address.value, target.address.value, count, FLOAT32)]
        assert DeviceWork(collective, lists, use_on).wait() == 0

    def calls() -> None:
        call(ALLGATHER, block, whole, length)
        call(ALLTOALL, whole, turned, length)
        call(REDUCE_SCATTER, turned, block, length)
        call(ALLREDUCE, block, block, length)

    calls()
    graph = captured(stream, calls)
    for turn in range(10):
        block.put(np.full(length, 1.0 + rank + turn, "f4"))
        graph.launch(stream)
        # After the all-to-all a rank has its own number from all; the next two calls add up those of all ranks.
        expected = size * sum(1.0 + other + turn for other in range(size))
        assert (block.get() == expected).all(), (turn, block.get()[0], expected)
    graph.destroy()


@nccl_only
def test_groups_and_asynchronous_calls_in_a_graph() -> None:
    stream, group = Stream(), dl_comm.Group(name="in graphs")
    one, other = Array(np.zeros(100, "f4"), stream), Array(np.zeros(70_000, "f4"), stream)
    group.allreduce([one], out=[one])

    def calls() -> None:
        works = [
            group.allreduce([one], out=[one], async_op=True),
            dl_comm.allreduce([other], "mean", out=[other], async_op=True),
        ]
        for work in works:
            work.wait()

    graph = captured(stream, calls)
    for _ in range(20):
        one.put(np.full(100, 1, "f4"))
        other.put(np.full(70_000, dl_comm.rank(), "f4"))
        graph.launch(stream)
        assert (one.get() == dl_comm.size()).all()
        np.testing.assert_allclose(other.get(), (dl_comm.size() - 1) / 2)
    graph.destroy()


@nccl_only
def test_a_rank_that_does_not_capture_is_a_mismatch() -> None:
    stream = Stream()
    array = Array(np.ones(10, "f4"), stream)
    if dl_comm.size() == 1:
        pytest.skip("needs several ranks")
    if dl_comm.rank() == 0:
        stream.capture(True)
    with pytest.raises(dl_comm.MismatchError):
        dl_comm.gradients([array], out=[array], name="captured by one")
    if dl_comm.rank() == 0:
        Graph(stream).destroy()
    dl_comm.gradients([array], out=[array])
    assert (array.get() == 1).all()


def test_what_a_graph_cannot_have_is_refused_on_each_rank_alone() -> None:
    stream = Stream()
    array = Array(np.ones(4, "?" if ON_NCCL else "f4"), stream)
    other = Array(np.ones(4, "f4"), stream)
    other.get()
    reason = "NCCL lacks its operator or element type" if ON_NCCL else "graphs need the path nccl"
    stream.capture(True)
    with pytest.raises(
        dl_comm.StateError, match=rf"captured into a GPU graph, but {reason}.*end the capture before it"
    ):
        dl_comm.allreduce([array], "bit_or" if ON_NCCL else "sum", out=[array])
    group = dl_comm.Group(name="without a path")
    with pytest.raises(dl_comm.StateError, match="make one before the capture"):
        group.allreduce([other], out=[other])
    Graph(stream).destroy()
    array = Array(np.ones(4, "f4"), Stream())
    dl_comm.gradients([array], out=[array])
    assert (array.get() == 1).all()
