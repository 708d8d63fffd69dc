"""NumPy arrays on 1, 2, 3 ranks: values, shapes, element types, large and many arrays, bad input."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import dl_comm as mc


def mean_of_ranks(size: int) -> float:
    return (size - 1) / 2


@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_one_array_past_two_to_the_31_elements(rank: int, size: int) -> None:
    if size > 2:
        pytest.skip("two ranks show it; more would need more memory than a small machine has")
    length = 2**31 + 17
    array = np.zeros(length, np.int8)
    places = [0, 1, 2**31 - 1, 2**31, length - 1]
    array[places] = 2 * rank + 2
    mc.broadcast([array], 0)
    assert (array[places] == 2).all()
    array[places] = 2 * rank + 2
    (mean,) = mc.gradients([array], 0)
    assert (mean[places] == size + 1).all()
    assert np.count_nonzero(mean) == len(places)


def test_average_of_metrics(rank: int, size: int) -> None:
    assert mc.average(float(rank)) == mean_of_ranks(size)
    assert mc.average(np.float32(rank)) == mean_of_ranks(size)
    array = np.array([rank, 1], np.float32)
    assert mc.average(array) is array
    assert (array == [mean_of_ranks(size), 1]).all()


def test_check_buffers_match(rank: int, size: int) -> None:
    same = [np.arange(10), np.ones((3, 3), np.float32)]
    assert mc.check_buffers_match(same, 1) == 0
    same[1][2, 2] += rank == size - 1
    assert mc.check_buffers_match(same, 0) == (0 if size == 1 else 1)
    with pytest.raises(mc.ArgumentError, match="empty"):
        mc.check_buffers_match([], 0)


def test_two_teams_from_two_threads(rank: int, size: int) -> None:
    wrong: list[int] = []

    def work(team: int) -> None:
        for turn in range(50):
            (mean,) = mc.gradients([np.full(100 * (team + 1), rank + turn, np.float64)], team)
            if not (mean == mean_of_ranks(size) + turn).all():
                wrong.append(turn)

    threads = [threading.Thread(target=work, args=(team,)) for team in (rank % 2, 1 - rank % 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_ranks(rank: int, size: int) -> None:
    assert type(mc.get_rank()) is int
    assert mc.rank() == rank
    assert mc.size() == size
    assert 0 <= mc.get_localrank() < mc.local_size() <= size
    assert mc.local_rank() == mc.get_localrank()
    mc.barrier()
    mc.init(np.int64(2), np.int32(2), np.int64(1000), "numpy")  # again: nothing happens


@pytest.mark.parametrize("call", [mc.gradients, mc.broadcast])
def test_bad_input_is_refused_and_the_next_call_works(call: object, rank: int, size: int) -> None:
    cases: list[tuple[object, type[Exception], str]] = [
        ([], mc.ArgumentError, "empty"),
        ([np.ones(3), None], mc.ArgumentError, "tensor 1 is None"),
        ([np.ones(3, ">f4")], TypeError, ">f4"),
        ([np.array(["a"])], TypeError, "<U1"),
        ([[1.0, 2.0]], TypeError, "list|float"),
        ([np.ones((4, 4))[:, ::2]], ValueError, "contiguous"),
        (["text"], mc.DTypeError, "is a str"),
        (None, mc.DTypeError, "list"),
        (np.ma.masked_array(np.ones(3), [True, False, False]), mc.ArgumentError, "masked"),
        (np.ones((4, 4))[:, ::2], ValueError, "contiguous"),
    ]
    if call is mc.gradients:
        cases.append(([np.ones(3, np.complex64)], mc.DTypeError, "complex64"))
    for argument, kind, words in cases:
        with pytest.raises(kind, match=words):
            call(argument, 0)  # type: ignore[operator]
    (mean,) = mc.gradients([np.array([rank], np.float32)], 0)
    assert mean == mean_of_ranks(size)


def test_one_array_or_number_instead_of_a_list(rank: int, size: int) -> None:
    x = np.full((2, 3), rank, np.float32)
    mean = mc.gradients(x)
    assert mean.shape == (2, 3)
    assert mean.dtype == np.float32
    assert (mean == mean_of_ranks(size)).all()
    assert (x == rank).all()
    assert mc.gradients(x.copy(), out=(into := np.empty_like(x))) is into
    assert (into == mean_of_ranks(size)).all()
    assert mc.gradients(float(rank)) == mean_of_ranks(size)
    assert type(mc.gradients(np.float32(rank))) is np.float32
    last = size - 1
    copy = mc.broadcast(x, last, in_place=False)
    assert (copy == last).all()
    assert (x == rank).all()
    assert mc.broadcast(x, last, name="weights") is x
    assert (x == last).all()
    assert mc.broadcast(rank, last) == last
    assert type(mc.broadcast(rank, last)) is int
    assert mc.broadcast(1j * rank, last) == 1j * last
    started = mc.broadcast(np.full(3, rank), last, async_op=True, name="later")
    assert (started.wait() == last).all()
    assert mc.broadcast(rank + 0.5, last, async_op=True).wait() == last + 0.5
    scalar = np.array(float(rank))
    assert mc.broadcast(scalar, last) is scalar
    assert scalar == last


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda a: mc.gradients([a], "a"), mc.ArgumentError, "team 'a' is out of range; teams go from 0"),
        (lambda a: mc.gradients([a], 2**40), mc.ArgumentError, f"team {2**40} is out of range"),
        (lambda a: mc.gradients([a], name=5), mc.DTypeError, "invalid name: 5"),
        (lambda a: mc.gradients([a], name="a\0b"), mc.ArgumentError, "invalid name: .* without NUL"),
        (lambda a: mc.gradients([a], name="\ud800"), mc.ArgumentError, "invalid name: .* .expected Unicode text"),
        (lambda a: mc.gradients([a, np.float32(1)]), mc.DTypeError, r"array 1 is a numpy.float32; .*numpy.array\("),
        (lambda a: mc.gradients([a, "x"]), mc.DTypeError, "array 1 is a str"),
        (
            lambda a: mc.gradients([a], out=[a[:2].copy()]),
            mc.ArgumentError,
            r"^out: array 0 .*\(2,\).*\(3,\) and float32",
        ),
        (lambda a: mc.gradients([a], out=[a.astype(np.int8)]), mc.ArgumentError, "^out: array 0 .*int8.*float32"),
        (lambda a: mc.gradients([a], out=[a, a]), mc.ArgumentError, "out has 2 arrays"),
        (lambda a: mc.gradients([a], out=a), mc.DTypeError, "^out takes a list"),
        (
            lambda a: mc.gradients([np.ones((2, 3)).T]),
            mc.ArgumentError,
            r"array 0 of shape \(3, 2\) is not C-contiguous",
        ),
        (lambda a: mc.gradients([np.array(["x"])]), mc.DTypeError, "array 0 has the element type <U1"),
        (lambda a: mc.gradients([np.ma.array(a, mask=[1, 0, 0])]), mc.ArgumentError, "array 0 is masked"),
        (lambda a: mc.gradients([a], out=[np.ma.array(a)]), mc.ArgumentError, "masked"),
        (lambda a: mc.broadcast([a, np.ma.array(a)]), mc.ArgumentError, "array 1 is masked"),
        (lambda a: mc.average(np.ma.array(a)), mc.ArgumentError, "masked"),
        (lambda a: mc.check_buffers_match([np.ma.array(a)]), mc.ArgumentError, "masked"),
        (lambda a: mc.average_metrics({"m": np.ma.masked}), mc.ArgumentError, "'m' is masked"),
        (lambda a: mc.broadcast([a], "a"), mc.ArgumentError, "root 'a' is out of range; ranks go from 0"),
        (lambda a: mc.broadcast([a], 1.5), mc.ArgumentError, "root 1.5"),
        (lambda a: mc.average(np.complex64(1j)), mc.DTypeError, "average needs a number"),
        (lambda a: mc.create_team("a"), mc.ArgumentError, "team 'a'"),
        (lambda a: mc.create_team(70, nthreads="b"), mc.ArgumentError, "invalid nthreads: 'b'"),
    ],
)
def test_errors_are_ours_and_name_the_argument(call: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        call(np.ones(3, np.float32))


def test_the_error_in_an_exception_of_a_framework() -> None:
    text = "{{node x}} dl_comm error -6: rank 1 has ended\n\t [[{{node x}}]] [Op:f]\n\nCreated in"
    error = mc.error_of(RuntimeError(text))
    assert type(error) is mc.PeerLostError
    assert str(error) == "rank 1 has ended"
    assert str(mc.error_of(OSError("dl_comm error -5: two\nlines [Op:f] name: x"))) == "two\nlines"
    ours = mc.MismatchError("calls differ")
    assert mc.error_of(ours) is ours
    wrapped = KeyError("wrapped")
    wrapped.__cause__ = ours
    assert mc.error_of(wrapped) is ours
    assert mc.error_of(ValueError("another")) is None


def test_teams_that_differ_between_ranks(rank: int, size: int) -> None:
    if size == 1:
        pytest.skip("needs two ranks")
    with pytest.raises(
        mc.MismatchError, match=r"rank 0: .*create_team\(team=50, nthreads=1, prec_level=0\)"
    ) as failure:
        mc.create_team(50, nthreads=1 + rank)
    assert "create_team(team=50, nthreads=2, prec_level=0)" in str(failure.value)
    mc.create_team(50)


def test_what_has_no_meaning_is_refused(rank: int, size: int) -> None:
    with pytest.raises(mc.DTypeError, match="bool"):
        mc.gradients([np.array([True])], 0)
    for team in (-1, 2, 64):
        with pytest.raises(mc.ArgumentError, match=f"team {team}"):
            mc.gradients([np.ones(1)], team)
    for root in (-1, size):
        with pytest.raises(mc.ArgumentError, match=f"root {root}"):
            mc.broadcast([np.ones(1)], root)
    with pytest.raises(ValueError, match="read-only"):
        mc.broadcast([np.broadcast_to(np.float32(1), (1,))], 0)
    with pytest.raises(mc.DTypeError, match="str"):
        mc.average("loss")
    with pytest.raises(mc.ArgumentError, match="exists"):
        mc.create_team(0)
    with pytest.raises(mc.ArgumentError, match="nteams"):
        mc.init(nteams=0)
    with pytest.raises(mc.ArgumentError, match="invalid msglen: 1.5"):
        mc.init(msglen=1.5)  # type: ignore[arg-type]
    with pytest.raises(mc.ArgumentError, match="framework"):
        mc.init(framework="caffe")
    mc.barrier()


def test_sizes_that_differ_are_named(rank: int, size: int) -> None:
    if size == 1:
        pytest.skip("one rank agrees with itself")
    array = np.full(5 if rank == 0 else 6, rank, np.float32)
    with pytest.raises(mc.MismatchError, match=r"float32\[5\]") as caught:
        mc.gradients([np.ones(1), array], 0)
    assert "float32[6]" in str(caught.value)
    assert "rank 0: average on team 0" in str(caught.value)
    assert (array == rank).all()
    with pytest.raises(mc.MismatchError, match="root|rank"):
        mc.broadcast([array[:5].copy()], rank % 2)
    with pytest.raises(mc.MismatchError, match="int64"):
        mc.check_buffers_match([np.ones(3, np.int64 if rank else np.int32)], 0)
    (mean,) = mc.gradients([np.array([rank], np.float32)], 0)
    assert mean == mean_of_ranks(size)
