"""Every collective on arrays of other libraries in GPU memory, against the same call on NumPy arrays.

Run on 1, 2 and 3 ranks by test_device.py. Three kinds of arrays: those of a library like JAX (DLPack, read-only), those
of one like CuPy (a named stream, ``empty``), and results of dl_comm, which it takes again.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import library
import numpy as np
import pytest
from arrays import Array as CudaArray
from arrays import Stream, counters, use

import dl_comm
from dl_comm._arrays.cuda_arrays import DeviceArray

GPUS = int(os.environ.get("FAKE_CUDA_DEVICES", "1"))
NUMBERS = [name for name in library.CODES if name not in ("bfloat16", "bool")]
REDUCED = {"sum", "mean", "min", "max", "product", "bit_and", "bit_or", "bit_xor"}


@pytest.fixture(scope="module", autouse=True)
def job() -> Iterator[None]:
    dl_comm.init()
    use(dl_comm.local_rank() % GPUS)
    yield
    assert path() == os.environ["PATH_EXPECTED"] or dl_comm.size() == 1
    dl_comm.finalize()


@pytest.fixture(params=[0, 1])
def major(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The version of DLPack that the library knows."""
    monkeypatch.setattr(library.Array, "major", request.param)
    return int(request.param)


def path() -> str:
    return str(dl_comm.topology()["teams"][0]["gpu"]["path"])


def values(dtype: str, length: int, rank: int | None = None, columns: int = 2) -> np.ndarray:
    """Small numbers: sums and products of three ranks are exact in every type."""
    rank = dl_comm.rank() if rank is None else rank
    numbers = ((np.arange(length * columns) * 7 + 3 * rank) % 5 + 1).reshape(length, columns)
    if dtype == "bfloat16":
        return (numbers.astype("f4").view("u4") >> 16).astype("u2")
    return (numbers % 2 if dtype == "bool" else numbers).astype(dtype)


def check(found: Any, expected: Any, mean: bool = False) -> None:
    """Compare an array that ``from_dlpack`` has made, or a list of them, with what NumPy arrays give."""
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            check(one, other, mean)
        return
    if expected is None:
        assert found is None
        return
    assert isinstance(found, library.Imported)
    # NCCL multiplies by 1/n.
    rounded = mean and path() == "nccl" and expected.dtype.kind in "fc"
    np.testing.assert_allclose(found.get(), expected, rtol=2e-3 if rounded else 0)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype.name


def both(
    call: Callable[..., Any], host: Any, *arguments: Any, mean: bool = False, naps: int = 0, **options: Any
) -> None:
    """Check a call on an array on a GPU, or a list of them, by that on NumPy arrays."""
    kept, listed = library.Array.exported, host if isinstance(host, list) else [host]
    arrays = [library.Array(each, naps=naps) for each in listed]
    found = call(arrays if isinstance(host, list) else arrays[0], *arguments, **options)
    expected = call(host, *arguments, **options)
    if isinstance(found, dl_comm.Work):
        found, expected = found.wait(), expected.wait()
    check(found, expected, mean)
    for one, before in zip(arrays, listed, strict=True):
        np.testing.assert_array_equal(one.get(), before)
    del arrays, one
    # The call gives the capsules back.
    gc.collect()
    assert library.Array.exported == kept


def operators(dtype: str) -> set[str]:
    kind = np.dtype(dtype).kind
    return {"c": {"sum", "mean"}, "f": {"sum", "mean", "min", "max", "product"}}.get(kind, REDUCED)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_reductions_of_every_type(dtype: str) -> None:
    size = dl_comm.size()
    for op in sorted(operators(dtype)):
        host, kept = values(dtype, 4 * size), {"mean": op == "mean"}
        both(dl_comm.allreduce, host, op, naps=2, **kept)
        both(dl_comm.reduce, host, size - 1, op, **kept)
        both(dl_comm.reduce_scatter, host, op, **kept)


@pytest.mark.parametrize("dtype", [*NUMBERS, "bool"])
def test_moves_of_every_type(dtype: str) -> None:
    rank, size = dl_comm.rank(), dl_comm.size()
    host, lengths = values(dtype, 4 * size), [2 * each + 1 for each in range(size)]
    both(dl_comm.all_gather, host)
    both(dl_comm.all_to_all, host)
    own = values(dtype, lengths[rank])
    both(dl_comm.all_gather, own, counts=lengths)
    both(dl_comm.all_gather, own, ragged=True)
    for root in range(size):
        both(dl_comm.gather, host, root)
        both(dl_comm.gather, own, root, ragged=True)
        both(dl_comm.scatter, host, root)
        both(dl_comm.scatter, values(dtype, sum(lengths)), root, counts=lengths)
        both(dl_comm.broadcast, host, root, in_place=False)
        # Nobody may write it, so the result is another array.
        check(dl_comm.broadcast(library.Array(host), root), values(dtype, 4 * size, root))


def test_bfloat16() -> None:
    size = dl_comm.size()
    raw, ones = values("bfloat16", 4 * size), [values("float32", 4 * size, rank) for rank in range(size)]

    def widened(found: library.Imported) -> np.ndarray:
        assert found.dtype == "bfloat16"
        return (found.get().astype("u4") << 16).view("f4")

    for op, of in {"sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum}.items():
        found = dl_comm.allreduce(library.Array(raw, "bfloat16"), op)
        np.testing.assert_array_equal(widened(found), of.reduce(ones))
    found = dl_comm.all_gather(library.Array(raw, "bfloat16"))
    np.testing.assert_array_equal(widened(found), np.concatenate(ones))
    (mean,) = dl_comm.gradients([library.Array(raw, "bfloat16")])
    np.testing.assert_allclose(widened(mean), np.mean(ones, axis=0), rtol=1e-2)


def test_blocks_of_other_lengths() -> None:
    rank, size = dl_comm.rank(), dl_comm.size()
    send = [rank + 2 * other for other in range(size)]
    receive = [other + 2 * rank for other in range(size)]
    host = values("float32", sum(send))
    both(dl_comm.all_to_all, host, send_counts=send, receive_counts=receive)
    both(dl_comm.all_to_all, host, send_counts=send)
    lengths = [2 * each + 1 for each in range(size)]
    both(dl_comm.reduce_scatter, values("float64", sum(lengths)), counts=lengths)
    own = values("int32", lengths[rank])
    for x in (own, library.Array(own)):
        assert dl_comm.all_gather(x, ragged=True, return_counts=True)[1] == lengths
        assert dl_comm.all_gather(x, counts=lengths, return_counts=True)[1] == lengths
    for x in (host, library.Array(host)):
        assert dl_comm.all_to_all(x, send_counts=send, return_counts=True)[1] == receive


def test_lists_with_counts() -> None:
    """Each array has its own, some of which are 0."""
    rank, size = dl_comm.rank(), dl_comm.size()
    counts = [[2 * each + 1 for each in range(size)], [3 * (each % 2) for each in range(size)], [0] * size]
    types = ("float32", "float64", "int32")
    own = [values(dtype, each[rank]) for dtype, each in zip(types, counts, strict=True)]
    whole = [values(dtype, sum(each)) for dtype, each in zip(types, counts, strict=True)]
    for options in ({"counts": counts}, {"ragged": True}):
        both(dl_comm.all_gather, own, **options)
        both(dl_comm.gather, own, size - 1, **options)
    both(dl_comm.scatter, whole, size - 1, counts=counts)
    both(dl_comm.reduce_scatter, whole, counts=counts)
    both(dl_comm.reduce_scatter, whole, "max", counts=counts)
    send = [[(rank + 2 * other + i) % 4 for other in range(size)] for i in range(3)]
    receive = [[(other + 2 * rank + i) % 4 for other in range(size)] for i in range(3)]
    given = [values(dtype, sum(each)) for dtype, each in zip(types, send, strict=True)]
    both(dl_comm.all_to_all, given, send_counts=send)
    both(dl_comm.all_to_all, given, send_counts=send, receive_counts=receive)


def test_lists_started_calls_groups_and_names(major: int) -> None:
    size = dl_comm.size()
    host = [values("float32", 3 * size), values("int16", 2 * size, columns=1), values("float64", size, columns=0)]
    group = dl_comm.Group(name="of arrays")
    both(dl_comm.allreduce, host, group=group)
    both(dl_comm.all_gather, host, group=group, by_name=True, name="gathered")
    both(dl_comm.broadcast, host, size - 1, group=group, in_place=False)
    both(group.reduce_scatter, host)
    both(dl_comm.allreduce, host, async_op=True, naps=20)
    both(dl_comm.allreduce, host[0], prescale=0.5, postscale=4.0)
    both(dl_comm.allreduce, host[0], "max", timeout=60)
    started = [dl_comm.allreduce(library.Array(each, naps=5), async_op=True) for each in host]
    mapped = dl_comm.all_gather(library.Array(host[0]), async_op=True).map(lambda array: array.get().shape)
    for each, expected in zip(started, [dl_comm.allreduce(each) for each in host], strict=True):
        check(each.wait(), expected)
        assert each.test()
    assert mapped.wait() == (3 * size * size, 2)
    group.free()


@pytest.mark.parametrize("length", [70_000, 2_200_001])
def test_long_calls(length: int) -> None:
    host = values("float32", length, columns=1)
    both(dl_comm.allreduce, host, naps=20)
    both(dl_comm.all_gather, host[:70_000])
    both(dl_comm.gradients, [host], mean=True)


def test_no_elements_and_no_axes() -> None:
    both(dl_comm.allreduce, np.ones((0, 3), "f4"))
    both(dl_comm.allreduce, np.array(dl_comm.rank(), "i8"))
    both(dl_comm.all_gather, np.array(dl_comm.rank(), "i8"))
    both(dl_comm.all_gather, np.ones((2 * (dl_comm.rank() % 2), 3), "f4"), ragged=True)


def test_scatter_without_arrays_on_the_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.Array, "major", 1)
    monkeypatch.setattr(library.Array, "writable", True)
    host = values("int32", 4 * dl_comm.size(), 0)
    out = library.Array(np.zeros((4, 2), "i4"))
    given = library.Array(host) if dl_comm.rank() == 0 else None
    assert dl_comm.scatter(given, out=out) is out
    np.testing.assert_array_equal(out.memory.peek(), host[4 * dl_comm.rank() :][:4])


def test_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Into arrays that say that they may be written: the call ends when the values are there."""
    monkeypatch.setattr(library.Array, "major", 1)
    host = values("float32", 9)
    given, out = library.Array(host, naps=20), library.Array(np.zeros_like(host))
    with pytest.raises(dl_comm.ArgumentError, match="array 0 is read-only"):
        dl_comm.allreduce(given, out=out)
    monkeypatch.setattr(library.Array, "writable", True)
    assert dl_comm.allreduce(given, out=out) is out
    np.testing.assert_array_equal(out.memory.peek(), dl_comm.allreduce(host))
    assert dl_comm.allreduce(out, "max", out=out) is out
    assert dl_comm.broadcast(out, 0) is out
    (same,) = dl_comm.gradients([given], out=[out])
    assert same is out
    np.testing.assert_allclose(out.memory.peek(), dl_comm.gradients([host])[0], rtol=1e-6)
    monkeypatch.setattr(library.Array, "major", 0)
    with pytest.raises(dl_comm.ArgumentError, match="does not say that it may be written"):
        dl_comm.allreduce(given, out=out)


def test_arrays_that_name_their_stream_stay_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CuPy's: results come from its own memory, and no call waits for the GPU."""
    stream, dtype, size = Stream(), "float32", dl_comm.size()
    made: list[CudaArray] = []

    def empty(shape: Any, dtype: Any) -> CudaArray:
        made.append(CudaArray(np.zeros(shape, dtype), stream))
        return made[-1]

    monkeypatch.setattr(sys.modules["arrays"], "empty", empty, raising=False)
    host = values(dtype, 5 * size)
    given = CudaArray(host, stream)
    for call in (dl_comm.allreduce, dl_comm.all_gather, dl_comm.all_to_all, dl_comm.reduce_scatter):
        expected = call(host)
        # It is complete after this call only.
        stream.sleep(30)
        given.put(host)
        found = call(given)
        assert found is made[-1]
        np.testing.assert_array_equal(found.get(), expected)
    given.put(host)
    assert dl_comm.broadcast(given, size - 1, in_place=False) is made[-1]
    np.testing.assert_array_equal(made[-1].get(), values(dtype, 5 * size, size - 1))
    work = dl_comm.allreduce(given, "max", out=given, async_op=True)
    assert work.wait() is given
    np.testing.assert_array_equal(given.get(), dl_comm.allreduce(host, "max"))
    (mean,) = dl_comm.gradients([given])
    assert mean is made[-1]


def test_results_for_a_library_without_from_dlpack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(library, "from_dlpack")
    host = values("float32", 6)
    y = dl_comm.allreduce(library.Array(host, naps=20))
    assert isinstance(y, DeviceArray)
    assert (y.shape, y.dtype, y.ndim, len(y)) == ((6, 2), "float32", 2, 6)
    assert repr(y) == f"DeviceArray(shape=(6, 2), dtype='float32', device={y.device})"
    interface = y.__cuda_array_interface__
    assert (interface["version"], interface["stream"], interface["typestr"]) == (3, None, "<f4")
    expected = dl_comm.allreduce(host)
    at = CudaArray.__new__(CudaArray)
    at.host, at.address = np.empty_like(host), ctypes.c_ulonglong(interface["data"][0])
    np.testing.assert_array_equal(at.peek(), expected)
    for major in (0, 1):
        np.testing.assert_array_equal(library.Imported(y, major).get(), expected)
    # dl_comm takes it, too, also in place.
    z = dl_comm.allreduce(y, "max", out=y)
    assert z is y
    assert isinstance(dl_comm.all_gather(y), DeviceArray)
    assert dl_comm.broadcast(y) is y
    with pytest.raises(BufferError, match="no copies"):
        y.__dlpack__(copy=True)
    half = dl_comm.allreduce(library.Array(values("bfloat16", 2), "bfloat16"))
    assert not hasattr(half, "__cuda_array_interface__")
    assert library.Imported(half, 1).dtype == "bfloat16"


def test_memory_lives_as_long_as_the_last_array_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given = library.Array(values("float32", 100_000))
    dl_comm.allreduce(given)
    gc.collect()
    before = counters()[1]
    monkeypatch.delattr(library, "from_dlpack")
    y = dl_comm.allreduce(given)
    taken, unused = library.Imported(y, 1), y.__dlpack__()
    kept = taken.get()
    del y, unused
    gc.collect()
    assert counters()[1] == before + kept.nbytes
    np.testing.assert_array_equal(taken.get(), kept)
    # A library may free it on a thread of its own.
    thread = threading.Thread(target=taken.free)
    thread.start()
    thread.join()
    assert counters()[1] == before


def test_the_order_of_a_stream_without_a_name_is_asked_for() -> None:
    given = library.Array(values("float32", 4))
    dl_comm.allreduce(given)
    assert given.given_streams == [1]


@pytest.mark.skipif("dl_comm.size() == 1")
def test_what_differs_is_an_error_on_all_ranks_and_the_next_call_works() -> None:
    host = np.ones(4 + dl_comm.rank(), "f4")
    with pytest.raises(dl_comm.MismatchError):
        dl_comm.allreduce(library.Array(host), name="odd")
    mixed = np.ones(4, "f4") if dl_comm.rank() == 0 else library.Array(np.ones(4, "f4"))
    with pytest.raises(dl_comm.MismatchError):
        dl_comm.all_gather(mixed, name="mixed")
    both(dl_comm.allreduce, np.ones(4, "f4"))


def test_bad_input_is_refused_and_the_next_call_works(monkeypatch: pytest.MonkeyPatch) -> None:
    x = library.Array(np.ones((4, 2), "f4"))
    with pytest.raises(dl_comm.ArgumentError, match="some arrays are in GPU memory"):
        dl_comm.allreduce([x, np.ones(3)])
    with pytest.raises(dl_comm.ArgumentError, match="some arrays are in GPU memory"):
        dl_comm.broadcast([x, np.ones(3)])
    with pytest.raises(dl_comm.ArgumentError, match="some arrays are in GPU memory"):
        dl_comm.allreduce(x, out=np.ones((4, 2), "f4"))
    with pytest.raises(dl_comm.ArgumentError, match="is in GPU memory, which this call does not take"):
        dl_comm.ParameterServer(x)
    with pytest.raises(dl_comm.ArgumentError, match="adasum: takes tensors in host memory"):
        dl_comm.allreduce(x, "adasum")
    with pytest.raises(dl_comm.ArgumentError, match="out has 2 arrays"):
        dl_comm.allreduce(x, out=[x, x])
    other, here = CudaArray(np.ones((4, 2), "f4"), Stream()), CudaArray(np.ones((4, 2), "f4"), Stream())
    for pair in ([x, other], [here, other]):
        with pytest.raises(dl_comm.ArgumentError, match="different streams"):
            dl_comm.allreduce(pair)
    # Version 2 does not know streams, and there is no __dlpack__.
    interface = {**other.__cuda_array_interface__, "version": 2}
    del interface["stream"]
    with pytest.raises(dl_comm.ArgumentError, match=r"does not name its stream .* and has no __dlpack__"):
        dl_comm.allreduce([SimpleNamespace(__cuda_array_interface__=interface)])
    refused = dict(interface, version=3, stream=None)
    for change, error, text in (
        ({"typestr": "<f12"}, dl_comm.DTypeError, "the element type <f12"),
        ({"mask": object()}, dl_comm.ArgumentError, "has a mask"),
        ({"strides": (4, 16)}, dl_comm.ArgumentError, "not C-contiguous"),
        ({"data": (np.ones(8, "f4").ctypes.data, False)}, dl_comm.ArgumentError, "not on a GPU"),
        ({"data": (0, False), "shape": (0, 2)}, dl_comm.ArgumentError, "do not say their GPU"),
    ):
        with pytest.raises(error, match=text):
            dl_comm.allreduce([SimpleNamespace(__cuda_array_interface__={**refused, **change})])
    # As JAX's on the CPU: DLPack, but not on a GPU.
    with pytest.raises(dl_comm.DTypeError, match="give a NumPy array"):
        dl_comm.allreduce(SimpleNamespace(__dlpack_device__=lambda: (1, 0)))

    def divided() -> Any:
        raise BufferError("the array is on several GPUs")

    with pytest.raises(dl_comm.ArgumentError, match="several GPUs"):
        dl_comm.allreduce(SimpleNamespace(__dlpack_device__=divided))
    for capsule, text in ((np.ones(3).__dlpack__(), "but its memory is not"), (object(), "cannot be exchanged")):
        odd = SimpleNamespace(__dlpack_device__=lambda: (2, 0), __dlpack__=lambda _=capsule, **options: _)
        with pytest.raises(dl_comm.ArgumentError, match=text):
            dl_comm.allreduce(odd)
    monkeypatch.setitem(library.CODES, "float32", (2, 8))
    with pytest.raises(dl_comm.DTypeError, match="an element type that dl_comm does not have"):
        dl_comm.allreduce(x)
    monkeypatch.undo()
    monkeypatch.setattr(library.Array, "major", 2)
    with pytest.raises(dl_comm.ArgumentError, match="DLPack 1, not 2"):
        dl_comm.allreduce(x)
    monkeypatch.undo()
    both(dl_comm.allreduce, np.ones((4, 2), "f4"))
