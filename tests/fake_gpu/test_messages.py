"""Messages of arrays in a GPU's memory, on the stand-in for one; run on some ranks by test_device.py.

``PATH_EXPECTED`` says whether the ranks read each other's memory (``ipc``) or host memory (``staged``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import library
import numpy as np
import pytest
from arrays import Array, Stream, call, counters, use
from fake import alloc_async

import dl_comm

GPUS = int(os.environ.get("FAKE_CUDA_DEVICES", "1"))
IPC = os.environ["PATH_EXPECTED"] == "ipc"
DTYPES = ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?", "c8", "c16"]
SHORT, LONG = 100, 300_001
several = pytest.mark.skipif("dl_comm.size() == 1")


@pytest.fixture(scope="module", autouse=True)
def job() -> Iterator[None]:
    dl_comm.init()
    use(dl_comm.local_rank() % GPUS)
    yield
    dl_comm.finalize()


@pytest.fixture
def new() -> Iterator[Callable[..., Array]]:
    """Makes arrays, which are freed after the test."""
    made = []

    def make(values: np.ndarray, stream: Stream | None = None, at: int | None = None) -> Array:
        array = Array(values, stream or Stream(), at)
        if at is None:
            made.append(array)
        return array

    yield make
    for array in made:
        array.free()


def ring() -> tuple[int, int]:
    """The ranks after and before this one."""
    return (dl_comm.rank() + 1) % dl_comm.size(), (dl_comm.rank() - 1) % dl_comm.size()


def values(length: int, dtype: str = "f4", rank: int | None = None) -> np.ndarray:
    return (np.arange(length) % 97 + 100 * (dl_comm.rank() if rank is None else rank)).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, SHORT, LONG])
def test_every_type_and_length_in_a_ring(new: Callable[..., Array], dtype: str, length: int) -> None:
    following, before = ring()
    x, out = new(values(length, dtype)), new(np.zeros(length, dtype))
    status = dl_comm.sendrecv(x, following, out, before)
    assert status == (before, 0, out.host.nbytes)
    np.testing.assert_array_equal(out.get(), values(length, dtype, before))
    np.testing.assert_array_equal(x.get(), x.host)


@pytest.mark.parametrize("length", [SHORT, LONG])
def test_bfloat16_of_a_library_without_a_stream(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.Array, "major", 1)
    monkeypatch.setattr(library.Array, "writable", True)
    following, before = ring()
    x = library.Array(values(length, "u2"), "bfloat16", naps=50)
    out = library.Array(np.zeros(length, "u2"), "bfloat16")
    dl_comm.sendrecv(x, following, out, before)
    np.testing.assert_array_equal(out.memory.get(), values(length, "u2", before))


@pytest.mark.parametrize("length", [SHORT, LONG, 3_000_000])
@pytest.mark.parametrize("sender_on_gpu", [True, False])
def test_between_gpu_and_host_memory(new: Callable[..., Array], length: int, sender_on_gpu: bool) -> None:
    following, before = ring()
    mine, zeros, expected = values(length), np.zeros(length, "f4"), values(length, "f4", before)
    if sender_on_gpu:
        dl_comm.sendrecv(new(mine), following, zeros, before)
        np.testing.assert_array_equal(zeros, expected)
    else:
        out = new(zeros)
        dl_comm.sendrecv(mine, following, out, before)
        np.testing.assert_array_equal(out.get(), expected)


@pytest.mark.parametrize("scale", [1, 2000])
def test_a_list_is_one_message_whatever_its_pieces(new: Callable[..., Array], scale: int) -> None:
    following, before = ring()
    lengths = [3 * scale, 0, 7 * scale, scale, 1]
    stream, other = Stream(), Stream()
    numbers = values(sum(lengths))
    xs = [new(part, stream) for part in np.split(numbers, np.cumsum(lengths)[:-1])]
    outs = [new(np.zeros(length, "f4"), other) for length in reversed(lengths)]
    dl_comm.sendrecv(xs, following, outs, before)
    np.testing.assert_array_equal(np.concatenate([out.get() for out in outs]), values(sum(lengths), "f4", before))


def test_more_pieces_than_an_announcement_can_describe(new: Callable[..., Array]) -> None:
    following, before = ring()
    stream = Stream()
    xs = [new(np.full(40 + i, i + dl_comm.rank(), "i4"), stream) for i in range(100)]
    outs = [new(np.zeros(40 + i, "i4"), stream) for i in range(100)]
    dl_comm.sendrecv(xs, following, outs, before)
    for i, out in enumerate(outs):
        np.testing.assert_array_equal(out.get(), np.full(40 + i, i + before))


@several
@pytest.mark.parametrize("length", [SHORT, LONG])
def test_any_source_and_tag(new: Callable[..., Array], length: int) -> None:
    others = set(range(1, dl_comm.size()))
    if dl_comm.rank() > 0:
        dl_comm.send(new(values(length)), 0, tag=10 + dl_comm.rank())
    while others and dl_comm.rank() == 0:
        out = new(np.zeros(length, "f4"))
        status = dl_comm.recv(out, None, None)
        assert status.tag == 10 + status.source
        np.testing.assert_array_equal(out.get(), values(length, "f4", status.source))
        others.remove(status.source)
    dl_comm.barrier()


@pytest.mark.parametrize("length", [SHORT, LONG])
def test_what_comes_after_waits_for_a_busy_stream(new: Callable[..., Array], length: int) -> None:
    """Messages to one rank keep their order; what the stream had to do before is in them."""
    following, before = ring()
    x = new(np.zeros(length, "f4"))
    x.stream.sleep(300)
    x.put(values(length))
    works = [dl_comm.send(x, following, async_op=True)]
    works += [dl_comm.send(np.full(length, i, "f4"), following, async_op=True) for i in (1, 2)]
    got = [np.zeros(length, "f4") for _ in range(3)]
    for out in got:
        dl_comm.recv(out, before)
    np.testing.assert_array_equal(got[0], values(length, "f4", before))
    assert got[1][0] == 1
    assert got[2][0] == 2
    for work in works:
        work.wait()


@several
def test_other_messages_go_on_while_one_waits_for_its_stream(new: Callable[..., Array]) -> None:
    following, before = ring()
    x, out = new(values(LONG)), new(np.zeros(LONG, "f4"))
    dl_comm.barrier()
    # Before the nap, for which all streams of a GPU with one queue wait.
    sending = dl_comm.send(x, following, tag=1, async_op=True)
    out.stream.sleep(1500)
    receiving = dl_comm.recv(out, before, tag=1, async_op=True)
    since = time.monotonic()
    for i in range(20):
        got = np.zeros(20_000, "f4")
        dl_comm.sendrecv(np.full(20_000, i, "f4"), following, got, before)
        assert got[-1] == i
    assert time.monotonic() - since < 1.2
    receiving.wait()
    sending.wait()
    np.testing.assert_array_equal(out.get(), values(LONG, "f4", before))


@pytest.mark.parametrize("length", [SHORT, LONG])
def test_earlier_work_of_the_receiver_sees_what_was_there(new: Callable[..., Array], length: int) -> None:
    following, before = ring()
    stream = Stream()
    x, out, copy = new(values(length)), new(np.full(length, 7, "f4"), stream), new(np.zeros(length, "f4"), stream)
    stream.sleep(200)
    call("cuMemcpyDtoDAsync_v2", copy.address, out.address, out.host.nbytes, stream.handle)
    dl_comm.sendrecv(x, following, out, before)
    np.testing.assert_array_equal(copy.get(), np.full(length, 7))
    np.testing.assert_array_equal(out.get(), values(length, "f4", before))


@pytest.mark.parametrize("length", [SHORT, LONG])
def test_the_sender_may_write_once_its_send_has_ended(new: Callable[..., Array], length: int) -> None:
    following, before = ring()
    x, out = new(values(length)), new(np.zeros(length, "f4"))
    for step in range(5):
        x.put(values(length) + step)
        receiving = dl_comm.recv(out, before, async_op=True)
        dl_comm.send(x, following)
        x.put(np.full(length, -1, "f4"))
        x.get()
        receiving.wait()
        np.testing.assert_array_equal(out.get(), values(length, "f4", before) + step)


@several
@pytest.mark.parametrize("on_gpu", [True, False])
def test_other_types_and_lengths_are_refused(new: Callable[..., Array], on_gpu: bool) -> None:
    following, before = ring()
    for length in (SHORT, LONG):
        sending = dl_comm.send(new(values(length)), following, async_op=True)
        out: Any = np.full(length, 5, "i4")
        with pytest.raises(dl_comm.MismatchError, match="expects int32, and the message has float32"):
            dl_comm.recv(new(out) if on_gpu else out, before)
        sending.wait()
        sending = dl_comm.send(new(values(length)), following, async_op=True)
        out = new(np.full(length - 1, 5, "f4"))
        with pytest.raises(dl_comm.ArgumentError, match="has room for"):
            dl_comm.recv(out, before)
        sending.wait()
        assert (out.get() == 5).all()
        # A shorter one is received, and the rest keeps its values.
        sending = dl_comm.send(new(values(length)), following, async_op=True)
        out = new(np.full(length + 9, 5, "f4"))
        assert dl_comm.recv(out, before).bytes == 4 * length
        sending.wait()
        np.testing.assert_array_equal(out.get(), [*values(length, "f4", before), *[5] * 9])


@several
def test_memory_that_was_freed_and_allocated_again() -> None:
    following, before = ring()
    out = Array(np.zeros(LONG, "f4"), Stream())

    def pass_on(step: int) -> int:
        x = Array(values(LONG) + step, Stream())
        dl_comm.sendrecv(x, following, out, before)
        np.testing.assert_array_equal(out.get(), values(LONG, "f4", before) + step)
        address = x.address.value
        x.free()
        return address

    addresses = [pass_on(step) for step in range(10)]
    assert len(set(addresses)) < 10, "the driver gives the same addresses again"
    dl_comm.barrier()
    used = counters()[1]
    # Of other lengths, at other addresses: the receivers close what was freed, so that the driver gives it back.
    held = []
    for step in range(10):
        held.append(Array(np.zeros(50_000 * (step + 1), "f4"), Stream()))
        pass_on(step)
    [array.free() for array in held]
    for step in range(20):
        pass_on(step)
    dl_comm.barrier()
    assert counters()[1] <= used + 8 * LONG
    out.free()


@several
def test_what_is_copied(new: Callable[..., Array]) -> None:
    """By ``ipc`` the receiver copies a long message, once; else each side copies it once, as it does a short one."""
    stream = Stream()
    for length, direct in ((LONG, IPC), (SHORT, False)):
        x, out = new(values(length), stream), new(np.zeros(length, "f4"), stream)
        x.get()
        out.get()
        dl_comm.barrier()
        before = counters()[3]
        if dl_comm.rank() == 0:
            dl_comm.send(x, 1)
        elif dl_comm.rank() == 1:
            dl_comm.recv(out, 0)
        copies = counters()[3] - before
        if dl_comm.rank() < 2:
            assert copies == (0 if direct and dl_comm.rank() == 0 else 1)
        dl_comm.barrier()


@several
def test_warm_messages_take_no_memory_and_ask_little(new: Callable[..., Array]) -> None:
    following, before = ring()
    arrays = [(new(values(length)), new(np.zeros(length, "f4"))) for length in (SHORT, LONG)]
    for _ in range(3):
        for x, out in arrays:
            dl_comm.sendrecv(x, following, out, before)
    dl_comm.barrier()
    then = counters()
    for _ in range(10):
        for x, out in arrays:
            dl_comm.sendrecv(x, following, out, before)
    now = counters()
    assert now[:2] == then[:2]
    # The binding asks for the GPU of each array; ipc whether the sender's memory, and some of that before, was freed.
    assert now[4] - then[4] <= 20 * 4 + 10 * 4


def test_memory_of_a_pool_goes_through_host_memory(new: Callable[..., Array]) -> None:
    following, before = ring()
    x = new(values(LONG), at=alloc_async(4 * LONG))
    out = new(np.zeros(LONG, "f4"), at=alloc_async(4 * LONG))
    dl_comm.sendrecv(x, following, out, before)
    np.testing.assert_array_equal(out.get(), values(LONG, "f4", before))


def test_many_at_once(new: Callable[..., Array]) -> None:
    following, before = ring()
    lengths = [1, 1024, 1025, 5000, 16_384, 70_000, 300_000] * 4
    streams = [Stream() for _ in range(3)]
    xs = [new(values(length) + i, streams[i % 3]) for i, length in enumerate(lengths)]
    outs = [new(np.zeros(length, "f4"), streams[(i + 1) % 3]) for i, length in enumerate(lengths)]
    receiving = [dl_comm.recv(out, before, tag=i, async_op=True) for i, out in enumerate(outs)]
    sending = [dl_comm.send(x, following, tag=i, async_op=True) for i, x in reversed(list(enumerate(xs)))]
    for work in (*receiving, *sending):
        work.wait()
    for i, out in enumerate(outs):
        np.testing.assert_array_equal(out.get(), values(lengths[i], "f4", before) + i)


def test_to_itself(new: Callable[..., Array]) -> None:
    rank = dl_comm.rank()
    for length in (SHORT, LONG):
        x = new(values(length))
        x.stream.sleep(100)
        x.put(values(length) + 1)
        works = [dl_comm.send(x, rank, async_op=True), dl_comm.send(np.full(length, 9, "f4"), rank, async_op=True)]
        out, last = new(np.zeros(length, "f4")), new(np.zeros(length, "f4"))
        dl_comm.recv(out, rank)
        dl_comm.recv(last, rank)
        np.testing.assert_array_equal(out.get(), values(length) + 1)
        np.testing.assert_array_equal(last.get(), np.full(length, 9))
        for work in works:
            work.wait()


def test_deadlines(new: Callable[..., Array]) -> None:
    following, before = ring()
    out = new(np.full(LONG, 3, "f4"))
    with pytest.raises(dl_comm.TimeoutError, match="receive"):
        dl_comm.recv(out, before, tag=9, timeout=0.2)
    x = new(values(LONG))
    x.stream.sleep(800)
    with pytest.raises(dl_comm.TimeoutError, match="send"):
        dl_comm.send(x, following, tag=9, timeout=0.2)
    with pytest.raises(dl_comm.TimeoutError, match="send"):
        dl_comm.send(x, following, tag=9, timeout=0.2)
    dl_comm.barrier()
    # Neither is left.
    dl_comm.sendrecv(x, following, out, before)
    np.testing.assert_array_equal(out.get(), values(LONG, "f4", before))


def test_a_receive_whose_stream_is_busy_beyond_its_deadline(new: Callable[..., Array]) -> None:
    following, before = ring()
    for length in (SHORT, LONG):
        x, out = new(values(length)), new(np.full(length, 3, "f4"))
        sending = dl_comm.send(x, following, async_op=True)
        x.get()
        time.sleep(0.2)  # the message is under way
        dl_comm.barrier()
        out.stream.sleep(1000)
        with pytest.raises(dl_comm.TimeoutError, match="receive"):
            dl_comm.recv(out, before, timeout=0.2)
        if length == LONG and IPC and following != dl_comm.rank():
            with pytest.raises(dl_comm.PeerLostError, match="the receiver gave up"):
                sending.wait()
        else:
            sending.wait()
        assert (out.get() == 3).all()
        dl_comm.barrier()


def test_what_cannot_be_sent_is_refused_and_the_next_is(new: Callable[..., Array]) -> None:
    following, before = ring()
    x, out = new(values(SHORT)), new(np.zeros(SHORT, "f4"))
    with pytest.raises(dl_comm.ArgumentError, match="some arrays are in GPU memory"):
        dl_comm.send([x, np.ones(3)], following)
    with pytest.raises(dl_comm.ArgumentError, match="different streams"):
        dl_comm.send([x, out], following)
    with pytest.raises(dl_comm.ArgumentError, match="read-only"):
        dl_comm.recv(library.Array(values(SHORT)), before)
    captured = new(values(SHORT))
    captured.stream.capture(True)
    with pytest.raises(dl_comm.StateError, match="graph"):
        dl_comm.send(captured, following)
    captured.stream.capture(False)
    dl_comm.sendrecv(x, following, out, before)
    np.testing.assert_array_equal(out.get(), values(SHORT, "f4", before))
