"""Programs for the fake NCCL, like programs.py: ``python nccl_programs.py NAME``."""

from __future__ import annotations

import ctypes
import struct
import sys
import time
from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_void_p
from multiprocessing.connection import Connection

from fake import Config, UniqueId, alloc, big, cuda, download, nccl, ok, start, stream, together, upload

nccl.ncclGetLastError.restype = ctypes.c_char_p
IN_PROGRESS = 7
# ncclDataType_t, the letter of struct, the size.
TYPES = {0: ("b", 1), 1: ("B", 1), 2: ("i", 4), 4: ("q", 8), 6: ("e", 2), 7: ("f", 4), 8: ("d", 8)}
SUM, AVERAGE = 0, 4


def unique_id(rank: int, pipes: list[Connection]) -> UniqueId:
    """The same for all ranks."""
    unique = UniqueId()
    if rank != 0:
        return UniqueId.from_buffer_copy(pipes[0].recv())
    ok(nccl.ncclGetUniqueId(byref(unique)))
    for pipe in pipes:
        pipe.send(bytes(unique))
    return unique


def join(rank: int, ranks: int, unique: UniqueId) -> c_void_p:
    """A communicator of all ranks."""
    comm = c_void_p()
    ok(nccl.ncclCommInitRank(byref(comm), ranks, unique, rank))
    return comm


def join_later(rank: int, ranks: int, unique: UniqueId) -> c_void_p:
    """A non-blocking communicator whose initialisation is in progress."""
    comm, config = c_void_p(), Config(ctypes.sizeof(Config), 0xCAFEBEEF, 22809, 0)
    assert nccl.ncclCommInitRankConfig(byref(comm), ranks, unique, rank, byref(config)) == IN_PROGRESS
    return comm


def settled(comm: c_void_p) -> int:
    """The state of a communicator after its operation in progress."""
    state = c_int(IN_PROGRESS)
    while state.value == IN_PROGRESS:
        ok(nccl.ncclCommGetAsyncError(comm, byref(state)))
        time.sleep(0.001)
    return state.value


def _sums_rank(rank: int, pipes: list[Connection]) -> None:
    start(rank)
    comm, on, ranks = join(rank, 3, unique_id(rank, pipes)), stream(), 3
    answer = c_int()
    for ask, expected in ((nccl.ncclCommCount, ranks), (nccl.ncclCommUserRank, rank), (nccl.ncclCommCuDevice, rank)):
        ok(ask(comm, byref(answer)))
        assert answer.value == expected

    def reduced(dtype: int, values: list[float], how: int) -> list[float]:
        code, size = TYPES[dtype]
        data = upload(struct.pack(f"{len(values)}{code}", *values))
        ok(nccl.ncclAllReduce(c_void_p(data), c_void_p(data), c_size_t(len(values)), dtype, how, comm, on))
        ok(cuda.cuStreamSynchronize(on))
        return list(struct.unpack(f"{len(values)}{code}", download(data, size * len(values))))

    for dtype in TYPES:
        assert reduced(dtype, [rank, 3 * rank, 1], SUM) == [3, 9, 3], dtype
        average = reduced(dtype, [3 * rank, 30, 1 + rank], AVERAGE)
        tolerance = 0.02 if dtype == 6 else 1e-5
        assert all(abs(a - b) <= tolerance for a, b in zip(average, [3, 30, 2], strict=True)), (dtype, average)
    assert reduced(0, [100], SUM) == [44], "integers wrap around"
    assert reduced(2, [-1 - rank], AVERAGE) == [-2]
    assert reduced(7, [0.1 * rank] * 200_000, SUM) == [struct.unpack("f", struct.pack("f", 0.3))[0]] * 200_000
    # bfloat16 by its bits: 1 + 2 + 3; then doubled sums, with a scalar on the host and on the device.
    data, count = c_void_p(upload(struct.pack("H", [0x3F80, 0x4000, 0x4040][rank]))), c_size_t(1)
    two, how = struct.pack("H", 0x4000), c_int()
    ok(nccl.ncclAllReduce(data, data, count, 9, SUM, comm, on))
    for residence, scalar in ((1, two), (0, c_void_p(upload(two)))):
        ok(nccl.ncclRedOpCreatePreMulSum(byref(how), scalar, 9, residence, comm))
        assert nccl.ncclAllReduce(data, data, count, 6, how, comm, on) == 4, "it is one of bfloat16"
        ok(nccl.ncclAllReduce(data, data, count, 9, how, comm, on))
        ok(nccl.ncclRedOpDestroy(how, comm))
        assert nccl.ncclAllReduce(data, data, count, 9, how, comm, on) == 4
    ok(cuda.cuStreamSynchronize(on))
    assert struct.unpack("H", download(data.value or 0, 2)) == (0x4358,), "6, 36, 216"
    # A group on two streams: operations run in call order.
    other, first, second = stream(), upload(struct.pack("f", rank)), alloc(4)
    ok(nccl.ncclGroupStart())
    ok(nccl.ncclAllReduce(c_void_p(first), c_void_p(first), c_size_t(1), 7, SUM, comm, on))
    ok(nccl.ncclBroadcast(c_void_p(first), c_void_p(second), c_size_t(1), 7, 2, comm, other))
    ok(nccl.ncclGroupEnd())
    ok(cuda.cuStreamSynchronize(other))
    assert struct.unpack("f", download(second, 4)) == (3,)
    ok(nccl.ncclCommFinalize(comm))
    assert nccl.ncclAllReduce(c_void_p(first), c_void_p(first), c_size_t(1), 7, SUM, comm, on) == 5
    ok(nccl.ncclCommDestroy(comm))
    assert nccl.ncclCommDestroy(comm) == 4


def _patient_rank(rank: int, pipes: list[Connection]) -> None:
    """A non-blocking communicator: no call waits, and calls respect an operation in progress."""
    start(rank)
    on, state, unique = stream(), c_int(), unique_id(rank, pipes)
    if rank == 1:
        pipes[0].recv()
    comm = join_later(rank, 2, unique)
    if rank == 0:
        early = c_void_p(upload(bytes(4)))
        ok(nccl.ncclCommGetAsyncError(comm, byref(state)))
        assert state.value == IN_PROGRESS, "rank 1 is not there yet"
        assert nccl.ncclAllReduce(early, early, c_size_t(1), 7, SUM, comm, on) == 4
        assert b"before its previous call" in nccl.ncclGetLastError(None)
        pipes[0].send("come")
    ok(settled(comm))
    data = upload(struct.pack("f", rank + 1))
    result = nccl.ncclAllReduce(c_void_p(data), c_void_p(data), c_size_t(1), 7, SUM, comm, on)
    assert result == IN_PROGRESS
    ok(settled(comm))
    ok(cuda.cuStreamSynchronize(on))
    assert struct.unpack("f", download(data, 4)) == (3,)
    # Rank 1 never makes this call: abort ends it.
    if rank == 0:
        assert nccl.ncclAllReduce(c_void_p(data), c_void_p(data), c_size_t(1), 7, SUM, comm, on) == IN_PROGRESS
        ok(settled(comm))
        time.sleep(0.05)
        assert cuda.cuStreamQuery(on) == 600
    ok(nccl.ncclCommAbort(comm))
    ok(cuda.cuStreamSynchronize(on))


def _same_device_rank(rank: int, pipes: list[Connection]) -> None:
    start(0)
    comm = join_later(rank, 2, unique_id(rank, pipes))
    assert settled(comm) == 5
    assert b"Duplicate GPU" in nccl.ncclGetLastError(comm)
    ok(nccl.ncclCommAbort(comm))


def _slices_rank(rank: int, pipes: list[Connection]) -> None:
    """Ranks 0 and 1 have slices of one GPU, rank 2 another GPU."""
    start(rank)
    names = [ctypes.create_string_buffer(16) for _ in range(2)]
    for name, device in zip(names, (0, rank), strict=True):
        ok(cuda.cuDeviceGetUuid_v2(name, device))
    assert (names[0].raw == names[1].raw) == (rank == 0), "slices have UUIDs of their own"
    comm, state = join_later(rank, 3, unique_id(rank, pipes)), c_int()
    if rank < 2:
        assert settled(comm) == 5
        assert b"Duplicate GPU" in nccl.ncclGetLastError(comm)
    else:
        pipes[0].recv()
        ok(nccl.ncclCommGetAsyncError(comm, byref(state)))
        assert state.value == IN_PROGRESS, "no rank has left yet"
        pipes[0].send("still waits")
    if rank == 1:
        pipes[0].send("refused")
        pipes[0].recv()
    if rank == 0:
        pipes[0].recv()
        pipes[1].send("both are refused")
        pipes[1].recv()
        pipes[0].send("leave")
    if rank == 2:
        assert settled(comm) == 6
    ok(nccl.ncclCommAbort(comm))


def _one_fails_rank(rank: int, pipes: list[Connection]) -> None:
    start(rank)
    comm, state = join_later(rank, 2, unique_id(rank, pipes)), c_int()
    if rank == 1:
        assert settled(comm) == 2
        assert b"no space left" in nccl.ncclGetLastError(comm)
        pipes[0].send("failed")
        pipes[0].recv()
    else:
        pipes[0].recv()
        ok(nccl.ncclCommGetAsyncError(comm, byref(state)))
        assert state.value == IN_PROGRESS, "rank 1 has not left yet"
        pipes[0].send("leave")
        assert settled(comm) == 6
    ok(nccl.ncclCommAbort(comm))


def _differ_rank(rank: int, pipes: list[Connection]) -> None:
    start(rank)
    comm = join(rank, 2, unique_id(rank, pipes))
    data = c_void_p(alloc(16))
    ok(nccl.ncclAllReduce(data, data, c_size_t(1 + rank), 7, SUM, comm, None))
    ok(cuda.cuStreamSynchronize(None))


def threads() -> None:
    """Two devices of one process in one group, as in ncclCommInitAll."""
    unique, comms = UniqueId(), [c_void_p(), c_void_p()]
    ok(nccl.ncclGetUniqueId(byref(unique)))
    ok(nccl.ncclGroupStart())
    for device in range(2):
        start(device)
        ok(nccl.ncclCommInitRank(byref(comms[device]), 2, unique, device))
    ok(nccl.ncclGroupEnd())
    assert cuda.cuMemFree_v2(big(0)) == 0


def _run(ranks: int, body: Callable[[int, list[Connection]], None]) -> Callable[[], None]:
    return lambda: together(ranks, body)


sums, patient = _run(3, _sums_rank), _run(2, _patient_rank)
slices, one_fails = _run(3, _slices_rank), _run(2, _one_fails_rank)
same_device, aborts_differ = _run(2, _same_device_rank), _run(2, _differ_rank)

if __name__ == "__main__":
    globals()[sys.argv[1]]()
