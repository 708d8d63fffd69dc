"""Streams, threads and GPU graphs: only streams wait for the GPU, and in the right order.

On host memory the same calls run without streams.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import pytest
import torch

import dl_comm as mc
import dl_comm.torch as cdl
from device_calls import blocking_device_call
from dl_comm.torch import _ops
from job import Job
from values import assert_mean, of_rank

LATE = 100_000_000
"""GPU cycles: about 50 ms."""


def late(job: Job) -> None:
    """Keeps torch's current stream busy; the host continues."""
    if job.on_gpu:
        torch.cuda._sleep(LATE)


def on_stream(stream: object) -> contextlib.AbstractContextManager[object]:
    """Makes a stream torch's current one; None: host memory."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


@pytest.mark.parametrize("count", [1000, 1_000_000])
@pytest.mark.parametrize("in_place", [False, True], ids=["new", "in place"])
def test_a_side_stream(job: Job, count: int, in_place: bool) -> None:
    """The producer is late, later work overwrites the inputs, and a consumer waits only for the stream."""
    everyone = [of_rank(rank, count, torch.float32) for rank in range(job.size)]
    source = everyone[job.rank].to(job.device, copy=True)
    data = torch.zeros_like(source)
    side = torch.cuda.Stream(job.device) if job.on_gpu else None
    if side is not None:
        side.wait_stream(torch.cuda.current_stream())
    with on_stream(side):
        late(job)
        data.copy_(source)
        if in_place:
            _ops.average_in_place([data], 0, "side")
            mean = data.clone()
        else:
            (mean,) = cdl.gradients([data], 0)
        data.fill_(-1)
        twice = mean * 2
    if side is not None:
        torch.cuda.current_stream().wait_stream(side)
        for tensor in (mean, twice, data):
            tensor.record_stream(torch.cuda.current_stream())
    thrice = mean + twice
    assert bool((data == -1).all())
    assert_mean(mean, everyone)
    assert torch.equal(thrice, mean * 3)


@pytest.mark.parametrize("count", [1000, 1_000_000])
def test_memory_that_is_reused_at_once(job: Job, count: int) -> None:
    """Torch reuses freed memory for the next tensor of the stream before the GPU runs the call."""
    sums = []
    for step in range(10):
        late(job) if step % 5 == 0 else None
        mine = torch.full((count,), float(job.rank + step), device=job.device)
        (mean,) = cdl.gradients([mine], 0)
        del mine
        torch.full((count,), -1e6, device=job.device)
        sums.append(mean.sum(dtype=torch.float64))
        del mean
        torch.full((count,), -1e6, device=job.device)
    assert [float(total) for total in sums] == [count * (job.middle + step) for step in range(10)]


def test_a_call_after_a_call(job: Job) -> None:
    """Each uses the previous result, alternating between two streams, short and long."""
    streams = [torch.cuda.Stream(job.device) for _ in range(2)] if job.on_gpu else [None, None]
    value = torch.full((5,), float(job.rank), device=job.device)
    long = torch.full((500_000,), float(job.rank), device=job.device)
    last = torch.cuda.current_stream() if job.on_gpu else None
    keep = []
    for step in range(8):
        stream = streams[step % 2]
        if stream is not None:
            stream.wait_stream(last)
        with on_stream(stream):
            keep += [value, long]
            late(job) if step == 0 else None
            value, long = cdl.gradients([value + job.rank, long + job.rank], 0)
        last = stream
    if last is not None:
        torch.cuda.current_stream().wait_stream(last)
    assert value.tolist() == [job.middle * 9] * 5
    assert bool((long == job.middle * 9).all())
    if job.on_gpu:
        torch.cuda.synchronize()  # before `keep` is freed


def in_threads(works: list[Callable[[], None]]) -> None:
    """Runs each function in a thread, and raises the first exception."""
    raised: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised below
            raised.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


def test_two_teams_in_two_threads(job: Job) -> None:
    def work(team: int) -> Callable[[], None]:
        def rounds() -> None:
            side = torch.cuda.Stream(job.device) if job.on_gpu else None
            with on_stream(side):
                for step in range(30):
                    count = 100 if step % 3 else 200_000 + team
                    mine = torch.full((count,), float(job.rank + step), device=job.device)
                    (mean,) = cdl.gradients([mine], team, name=f"step {step}")
                    assert bool((mean == job.middle + step).all()), (team, step)

        return rounds

    in_threads([work(0), work(1)])


def test_one_team_in_two_threads(job: Job) -> None:
    """Calls have different names, and the ranks reconcile them."""

    def work(name: str, value: float) -> Callable[[], None]:
        def rounds() -> None:
            side = torch.cuda.Stream(job.device) if job.on_gpu else None
            with on_stream(side):
                for step in range(15):
                    mine = torch.full((1000,), value + job.rank, device=job.device)
                    (mean,) = cdl.gradients([mine], 0, name=f"{name} {step}")
                    assert bool((mean == value + job.middle).all()), (name, step)

        return rounds

    in_threads([work("first", 10.0), work("second", 1000.0)])


def test_the_host_does_not_wait(job: Job) -> None:
    """If streams can wait for each other, a call returns before its inputs are complete."""
    data = torch.ones(1000, device=job.device)
    cdl.gradients([data], 0)
    gpu = job.gpu()
    if gpu is None or gpu["path"] == "staged" or gpu["sync"] == "host":
        pytest.skip("the host has to wait here")
    torch.cuda.synchronize()
    mc.barrier()
    done = torch.cuda.Event()
    torch.cuda._sleep(20 * LATE)
    done.record()
    (mean,) = cdl.gradients([data], 0)
    assert not done.query()
    assert bool((mean == 1).all())


@pytest.mark.parametrize("count", [1000, 1_000_000])
def test_a_blocking_call_returns_with_the_result_and_its_stream_continues(job: Job, count: int) -> None:
    if not job.on_gpu:
        pytest.skip("needs a GPU")
    data = torch.full((count,), float(job.rank), device=job.device)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    call = (data.data_ptr(), count, job.device.index, stream.cuda_stream, "waits")
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(blocking_device_call(*call)))
    mc.barrier()
    if job.rank > 0:
        time.sleep(0.5)  # so that rank 0 waits for the others
    thread.start()
    if job.rank == 0 and job.size > 1:
        time.sleep(0.2)
        assert thread.is_alive()
        assert stream.query()
    thread.join()
    assert codes == [0]
    # On an idle stream.
    assert bool((data == job.middle).all())


class TestGraphs:
    """With NCCL a graph has the calls; on other paths they are refused during a capture and do not break it."""

    @pytest.fixture(autouse=True)
    def goes_on(self, job: Job):  # noqa: ANN201 (a generator)
        if not job.on_gpu:
            pytest.skip("needs a GPU")
        yield
        (mean,) = cdl.gradients([torch.full((7,), float(job.rank), device=job.device)], 0)
        assert mean.tolist() == [job.middle] * 7

    @staticmethod
    def on_nccl(job: Job) -> bool:
        gpu = job.gpu()
        return gpu is not None and gpu["path"] == "nccl"

    @pytest.mark.parametrize("count", [1, 40])
    def test_a_hundred_replays_equal_as_many_calls(self, job: Job, count: int) -> None:
        if not self.on_nccl(job):
            pytest.skip("graphs need NCCL")
        given = [torch.zeros(1000 + each, device=job.device) for each in range(count)]
        got = [torch.zeros_like(each) for each in given]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for mine, copy in zip(given, got, strict=True):
                copy.copy_(mine)
            _ops.average_in_place(got, 0, "captured")
        random = torch.Generator(device=job.device).manual_seed(job.rank)
        for _ in range(100):
            for each in given:
                each.normal_(generator=random)
            graph.replay()
            means = cdl.gradients(given, 0)
            assert all(torch.equal(one, other) for one, other in zip(got, means, strict=True))

    def test_a_call_under_capture_is_refused(self, job: Job) -> None:
        if self.on_nccl(job):
            pytest.skip("graphs have the calls of NCCL")
        data = torch.ones(10, device=job.device)
        graph = torch.cuda.CUDAGraph()
        time.sleep(0.1)  # earlier calls are complete
        with torch.cuda.graph(graph):
            twice = data * 2
            with pytest.raises(mc.StateError, match="captured into a GPU graph"):
                _ops.average_in_place([data], 0, "captured")
        data.fill_(4)
        graph.replay()
        assert twice.tolist() == [8.0] * 10

    def test_a_capture_while_an_average_is_under_way(self, job: Job) -> None:
        team = 42
        mc.create_team(team)
        data = torch.full((1000,), float(job.rank), device=job.device)
        side = torch.cuda.Stream(job.device)
        other = torch.ones(10, device=job.device)
        side.wait_stream(torch.cuda.current_stream())
        torch.cuda.synchronize()
        cdl.gradients([data], team)
        late(job)
        (mean,) = cdl.gradients([data], team)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(side):
            graph.capture_begin()
            try:
                twice = other * 2
                time.sleep(0.15)  # while the average completes, which a thread monitors
            finally:
                graph.capture_end()
        torch.cuda.synchronize()
        graph.replay()
        assert twice.tolist() == [2.0] * 10
        assert bool((mean == job.middle).all())
        cdl.gradients([data], team)
