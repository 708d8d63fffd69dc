"""Averages and broadcasts of arrays in a GPU's memory, on the stand-in for one; run on some ranks by test_device.py.

``PATH_EXPECTED`` names the path that the calls are to take.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from arrays import Array, Stream, counters, use
from fake import Chunks, alloc_async, alloc_managed

import dl_comm
from device_calls import DeviceWork, blocking_device_call

DTYPES = ["f2", "f4", "f8", "i1", "u1", "i4", "i8"]
GPUS = int(os.environ.get("FAKE_CUDA_DEVICES", "1"))
# By IPC, calls of up to 4 MiB / ranks take one kernel from a copy of the inputs; the last is longer in every type.
LENGTHS = [1, 5, 1000, 65537, 300001, 2200001]


@pytest.fixture(scope="module", autouse=True)
def job() -> Iterator[None]:
    dl_comm.init(nteams=2)
    use(dl_comm.local_rank() % GPUS)
    yield
    dl_comm.finalize()


def values(length: int, dtype: str, rank: int) -> np.ndarray:
    """Numbers that the ranks' sums hold exactly, some of them negative."""
    numbers = np.arange(length) % 23 - 7 * rank
    return (np.abs(numbers) if dtype == "u1" else numbers).astype(dtype)


def mean(length: int, dtype: str) -> np.ndarray:
    """The mean as the core makes it of the same arrays in host memory."""
    on_host = values(length, dtype, dl_comm.rank())
    return dl_comm.gradients([on_host])[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_means_have_the_bits_of_those_in_host_memory(dtype: str, length: int) -> None:
    array = Array(values(length, dtype, dl_comm.rank()), Stream())
    dl_comm.gradients([array], out=[array])
    found, expected = array.get(), mean(length, dtype)
    if path() == "nccl" and dtype in ("f2", "f4", "f8"):  # which divides before it adds
        np.testing.assert_allclose(found, expected, rtol=5e-3 if dtype == "f2" else 1e-6, atol=2e-2)
    else:
        np.testing.assert_array_equal(found, expected)
    array.free()


def path() -> str:
    return str(dl_comm.topology()["teams"][0]["gpu"]["path"])


def test_the_path_is_the_expected_one() -> None:
    gpu = dl_comm.topology()["teams"][0]["gpu"]
    assert gpu["path"] == os.environ["PATH_EXPECTED"] if dl_comm.size() > 1 else "single_rank"
    assert gpu["gpu_name"] == "Fake GPU"
    assert gpu["reason"] or gpu["path"] in ("nccl", "single_rank")
    assert dl_comm.topology()["teams"][1]["gpu"] is None


def test_lists_of_many_arrays_of_several_types_out_of_place() -> None:
    stream = Stream()
    shapes = [(i % 7, 3) if i % 5 else () for i in range(200)] + [(300, 301)]
    ranks = [values(int(np.prod(s)), DTYPES[i % 7], dl_comm.rank()).reshape(s) for i, s in enumerate(shapes)]
    sources = [Array(each, stream) for each in ranks]
    targets = [Array(np.zeros_like(each), stream) for each in ranks]
    dl_comm.gradients(sources, out=targets, name="many")
    expected = dl_comm.gradients(ranks, name="many")
    for source, target, before, after in zip(sources, targets, ranks, expected, strict=True):
        np.testing.assert_allclose(target.get(), after, rtol=5e-3 if before.dtype == np.float16 else 1e-6, atol=2e-2)
        np.testing.assert_array_equal(source.get(), before)
        source.free()
        target.free()


@pytest.mark.parametrize("precise", [0, 1])
def test_sums_are_rounded_as_those_of_host_memory(precise: int) -> None:
    if path() == "nccl":
        pytest.skip("NCCL has an order, and roundings, of its own")
    dl_comm.create_team(2 + precise, prec_level=precise)
    random = np.random.default_rng(dl_comm.rank())
    on_host = [random.normal(size=9001 + i).astype(("f2", "f4", "f4", "i1", "f2", "f8")[i % 6]) for i in range(30)]
    stream = Stream()
    arrays = [Array(each, stream) for each in on_host]
    dl_comm.gradients(arrays, 2 + precise, out=arrays)
    for array, expected in zip(arrays, dl_comm.gradients(on_host, 2 + precise), strict=True):
        np.testing.assert_array_equal(array.get(), expected)
        array.free()


@pytest.mark.parametrize("length", [1000, 2200001])
@pytest.mark.parametrize("dtype", ["i1", "u1", "i4", "u4", "i8", "u8"])
def test_sums_of_integers_wrap_around(dtype: str, length: int) -> None:
    codes = {"i1": 4, "u1": 5, "i4": 6, "i8": 7, "u4": 10, "u8": 11}
    rng = [np.random.default_rng(rank) for rank in range(dl_comm.size())]
    bounds = np.iinfo(dtype)
    every = [each.integers(bounds.min, bounds.max, length, dtype, endpoint=True) for each in rng]
    array = Array(every[dl_comm.rank()], Stream())
    before = counters()
    where = (dl_comm.local_rank() % GPUS, array.stream.handle.value)
    assert DeviceWork(1, [(array.address.value, array.address.value, length, codes[dtype])], where).wait() == 0
    launches, copies = (now - then for now, then in zip(counters()[2:4], before[2:4], strict=True))
    np.testing.assert_array_equal(array.get(), sum(every[1:], every[0]))
    if path() == "ipc":
        # Kernels only; their lists may be copied.
        assert launches >= 1, launches
        assert copies <= 1, copies
    array.free()


@pytest.mark.parametrize("length", [3, 500000])
def test_broadcasts_from_every_rank(length: int) -> None:
    for root in range(dl_comm.size()):
        arrays = [Array(np.full(length, dl_comm.rank(), kind), Stream()) for kind in ("f4", "?", "i8")]
        for array in arrays[:1] + arrays[2:]:
            dl_comm.broadcast([array], root)
            assert (array.get() == root).all()
        dl_comm.broadcast([arrays[1]], root)
        assert (arrays[1].get() == bool(root)).all()
        for array in arrays:
            array.free()


def test_the_order_of_the_stream_is_kept_without_any_waiting() -> None:
    array = Array(np.zeros(100000, "f4"), Stream())
    for step in range(20):
        array.put(np.full(100000, step + dl_comm.rank(), "f4"))
        dl_comm.gradients([array], out=[array])
    middle = (dl_comm.size() - 1) / 2
    np.testing.assert_allclose(array.get(), 19 + middle)
    array.free()


@pytest.mark.parametrize("length", [1000, 600000])
def test_a_call_that_waits_ends_with_the_result_and_its_stream_goes_on(length: int) -> None:
    array = Array(np.full(length, dl_comm.rank(), "f4"), Stream())
    array.get()
    codes: list[int] = []
    call = (array.address.value, length, dl_comm.local_rank() % GPUS, array.stream.handle.value, "waits")
    thread = threading.Thread(target=lambda: codes.append(blocking_device_call(*call)))
    dl_comm.barrier()
    if dl_comm.rank() > 0:
        time.sleep(0.5)  # so that rank 0 waits for the others
    thread.start()
    if dl_comm.rank() == 0 and dl_comm.size() > 1:
        time.sleep(0.2)
        assert thread.is_alive()
        assert array.stream.is_idle()
    thread.join()
    assert codes == [0]
    assert (array.peek() == (dl_comm.size() - 1) / 2).all()
    array.free()


def test_memory_that_is_freed_and_taken_anew_is_found_again() -> None:
    for step in range(12):
        array = Array(np.full(600000 + 1000 * (step % 3), step + dl_comm.rank(), "f4"), Stream())
        dl_comm.gradients([array], out=[array])
        np.testing.assert_allclose(array.get(), step + (dl_comm.size() - 1) / 2)
        array.free()


def in_chunks() -> int:
    """How many calls of team 0 went in chunks, because memory could not be opened by the other ranks."""
    return int(dl_comm.topology()["teams"][0]["gpu"]["calls_in_chunks"])


@pytest.mark.parametrize("kind", ["managed", "pool", "chunks"])
@pytest.mark.parametrize("length", [100, 900000])
def test_memory_that_has_no_handle_is_averaged_too(kind: str, length: int) -> None:
    chunks = Chunks(4 * Chunks.CHUNK, dl_comm.local_rank() % GPUS)
    for _ in range(3):
        chunks.grow()
    # Those of chunks lie across a border.
    at = {"managed": alloc_managed, "pool": alloc_async, "chunks": lambda _: chunks.address + Chunks.CHUNK - 64}[kind]
    array = Array(values(length, "f4", dl_comm.rank()), Stream(), at(4 * length))
    before = in_chunks()
    for _ in range(2):
        array.put(values(length, "f4", dl_comm.rank()))
        dl_comm.gradients([array], out=[array])
        np.testing.assert_allclose(array.get(), mean(length, "f4"), rtol=1e-6)
    if path() == "ipc":
        assert in_chunks() - before == (2 if length > 100 else 0)
    else:
        assert in_chunks() == 0


@pytest.mark.parametrize("dtype", ["f2", "f4", "i8"])
def test_long_calls_on_memory_without_handles_have_the_same_bits(dtype: str) -> None:
    """Several chunks, out of place, with handles on one rank only; then broadcasts from each rank."""
    length = (20 << 20) // np.dtype(dtype).itemsize + 13
    stream = Stream()
    mine = values(length, dtype, dl_comm.rank())
    at = None if dl_comm.rank() == 1 else alloc_async(mine.nbytes)
    source, target = Array(mine, stream, at), Array(np.zeros_like(mine), stream)
    dl_comm.gradients([source], out=[target])
    expected = mean(length, dtype)
    if path() == "nccl" and dtype in ("f2", "f4", "f8"):
        np.testing.assert_allclose(target.get(), expected, rtol=5e-3 if dtype == "f2" else 1e-6, atol=2e-2)
    else:
        np.testing.assert_array_equal(target.get(), expected)
    np.testing.assert_array_equal(source.get(), mine)
    for root in range(dl_comm.size()):
        source.put(mine + np.array(1, dtype))
        dl_comm.broadcast([source], root)
        np.testing.assert_array_equal(source.get(), values(length, dtype, root) + np.array(1, dtype))
    target.free()


def test_memory_that_one_team_has_open_and_another_finds_freed() -> None:
    for step in range(4):
        arrays = []
        for team in (0, 1):
            array = Array(np.full(900000 + 100000 * step, step + team + dl_comm.rank(), "f4"), Stream())
            dl_comm.gradients([array], team, out=[array])
            np.testing.assert_allclose(array.get(), step + team + (dl_comm.size() - 1) / 2)
            arrays.append(array)
        # The next ones are where these were, and the other team comes first there.
        arrays[step % 2].free()
        array = Array(np.full(600000, dl_comm.rank(), "f4"), Stream())
        dl_comm.gradients([array], 1 - step % 2, out=[array])
        np.testing.assert_allclose(array.get(), (dl_comm.size() - 1) / 2)
        array.free()
        arrays[1 - step % 2].free()


def test_what_was_freed_is_given_back_by_later_long_calls() -> None:
    """As long as the other ranks have it open, the driver keeps it."""
    small = Array(np.zeros(600000, "f4"), Stream())
    # What tests before this one have freed is given back first.
    for _ in range(2):
        dl_comm.gradients([small], out=[small])
    dl_comm.barrier()
    before = counters()[1]
    large = Array(np.zeros(4000000, "f4"), Stream())
    dl_comm.gradients([large], out=[large])
    assert counters()[1] >= before + large.host.nbytes
    large.free()
    # Each call asks about a few.
    for _ in range(30):
        dl_comm.gradients([small], out=[small])
    small.get()
    dl_comm.barrier()
    assert counters()[1] < before + large.host.nbytes
    small.free()


def test_a_call_asks_the_driver_about_its_own_memory_and_little_else() -> None:
    stream = Stream()
    arrays = [Array(np.ones(40_000, "f4"), stream) for _ in range(40)]
    one = [Array(np.ones(700_000, "f4"), stream)]
    for given in (arrays, one, arrays, one):
        dl_comm.gradients(given, out=given)
    for given in (arrays, one):
        before = counters()
        dl_comm.gradients(given, out=given)
        launches, _, queries = (now - then for now, then in zip(counters()[2:], before[2:], strict=True))
        # The binding asks for kind and GPU of each source and target.
        assert queries <= 4 * len(given) + len(given) + 8, queries
        if path() == "ipc":
            assert launches <= 2, launches
    for array in (*arrays, *one):
        array.free()


def test_teams_work_side_by_side() -> None:
    failures: list[BaseException] = []

    def work(team: int) -> None:
        try:
            use(dl_comm.local_rank() % GPUS)
            for length in (100, 90000, 7, 700000):
                array = Array(np.full(length, team + dl_comm.rank(), "f4"), Stream())
                for _ in range(3):
                    dl_comm.gradients([array], team, out=[array])
                np.testing.assert_allclose(array.get(), team + (dl_comm.size() - 1) / 2)
                array.free()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(team,)) for team in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_calls_take_no_memory_once_they_are_warm() -> None:
    array, small = Array(np.ones(600000, "f4"), Stream()), Array(np.ones(9, "f4"), Stream())
    for _ in range(6):
        dl_comm.gradients([array], out=[array])
        dl_comm.gradients([small], out=[small])
    before = counters()[:2]
    for _ in range(10):
        dl_comm.gradients([array], out=[array])
        dl_comm.gradients([small], out=[small])
    assert counters()[:2] == before
    array.free()
    small.free()


@pytest.mark.skipif("dl_comm.size() == 1")
def test_what_differs_between_ranks_is_told_and_nothing_moves() -> None:
    array = Array(np.full(8 + dl_comm.rank(), dl_comm.rank(), "f4"), Stream())
    with pytest.raises(dl_comm.MismatchError, match="on a GPU"):
        dl_comm.gradients([array], out=[array], name="odd")
    assert (array.get() == dl_comm.rank()).all()
    # One rank's tensor in host memory is a difference too.
    on_host = np.ones(4, "f4")
    four = on_host if dl_comm.rank() == 0 else Array(on_host, Stream())
    with pytest.raises(dl_comm.MismatchError):
        dl_comm.gradients([four], out=[four], name="mixed")
    again = Array(np.full(8, dl_comm.rank(), "f4"), Stream())
    dl_comm.gradients([again], out=[again])
    np.testing.assert_allclose(again.get(), (dl_comm.size() - 1) / 2)


def test_bad_input_is_refused_and_the_next_call_works() -> None:
    array, other = Array(np.ones(4, "f4"), Stream()), Array(np.ones(5, "f4"), Stream())
    with pytest.raises(dl_comm.ArgumentError, match=r"out: array 0 has the shape \(5,\)"):
        dl_comm.gradients([array], out=[other])
    with pytest.raises(dl_comm.ArgumentError, match="some arrays are in GPU memory"):
        dl_comm.gradients([array, np.ones(3)])
    with pytest.raises(dl_comm.ArgumentError, match="one list"):
        dl_comm.gradients([[array], [other]], out=[[array], [other]])
    with pytest.raises(dl_comm.ArgumentError, match="share memory"):
        dl_comm.gradients([array, array], out=[array, array])
    with pytest.raises(dl_comm.ArgumentError, match="different streams"):
        dl_comm.gradients([array, other], out=[array, other])
    odd = Array(np.ones(3, "?"), Stream())
    with pytest.raises(dl_comm.DTypeError, match="bool"):
        dl_comm.gradients([odd], out=[odd])
    dl_comm.gradients([array], out=[array])
    assert (array.get() == 1).all()


def test_a_capture_by_the_program_while_an_average_is_under_way_harms_neither() -> None:
    array, other = Array(np.full(70000, dl_comm.rank(), "f4"), Stream()), Stream()
    array.stream.sleep(200)
    dl_comm.gradients([array], out=[array])
    other.capture(True)
    time.sleep(0.4)
    other.capture(False)
    np.testing.assert_allclose(array.get(), (dl_comm.size() - 1) / 2)
    dl_comm.gradients([array], out=[array])
    array.free()


def test_the_default_stream_of_each_thread_is_refused() -> None:
    array = Array(np.ones(4, "f4"), Stream())
    array.stream.handle = ctypes.c_void_p(2)
    with pytest.raises(dl_comm.ArgumentError, match="per-thread"):
        dl_comm.gradients([array], out=[array])


def test_a_schedule_that_does_not_block_is_refused() -> None:
    array = Array(np.ones(4, "f4"), Stream())
    dl_comm.config_team(1, 0, 0, 100)
    with pytest.raises(dl_comm.ArgumentError, match="non-blocking"):
        dl_comm.gradients([array], 1, out=[array])
    dl_comm.config_team(1, 0, 100, 100)
    dl_comm.gradients([array], 1, out=[array])
    assert (array.get() == 1).all()
