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
TYPES = {
    0: ("b", 1),
    1: ("B", 1),
    2: ("i", 4),
    3: ("I", 4),
    4: ("q", 8),
    5: ("Q", 8),
    6: ("e", 2),
    7: ("f", 4),
    8: ("d", 8),
}
SUM, PRODUCT, MAX, MIN, AVERAGE = range(5)


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
        assert reduced(dtype, [rank + 1, 2, rank], PRODUCT) == [6, 8, 0], dtype
        assert reduced(dtype, [rank, 2 - rank, 7], MAX) == [2, 2, 7], dtype
        assert reduced(dtype, [rank, 2 - rank, 7], MIN) == [0, 0, 7], dtype
        average = reduced(dtype, [3 * rank, 30, 1 + rank], AVERAGE)
        tolerance = 0.02 if dtype == 6 else 1e-5
        assert all(abs(a - b) <= tolerance for a, b in zip(average, [3, 30, 2], strict=True)), (dtype, average)
    assert reduced(0, [100], SUM) == [44], "integers wrap around"
    assert reduced(2, [-1 - rank], AVERAGE) == [-2]
    assert reduced(0, [rank - 1], MAX) == [1], "signed integers have an order"
    assert reduced(0, [rank - 1], MIN) == [-1]
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


def _blocks_rank(rank: int, pipes: list[Connection]) -> None:
    """The operations that divide data into blocks, in place and apart, long and short."""
    start(rank)
    comm, on, ranks = join(rank, 3, unique_id(rank, pipes)), stream(), 3

    def floats(values: list[float]) -> int:
        return upload(struct.pack(f"{len(values)}f", *values))

    def read(at: int, count: int) -> list[float]:
        ok(cuda.cuStreamSynchronize(on))
        return list(struct.unpack(f"{count}f", download(at, 4 * count)))

    def pointer(at: int) -> c_void_p:
        return c_void_p(at)

    for length in (1, 5, 100_000):
        count, mine = c_size_t(length), [float(rank)] * length
        whole = [float(block) for block in range(ranks) for _ in range(length)]
        # All-gather, apart and in place.
        target = alloc(4 * 3 * length)
        ok(nccl.ncclAllGather(pointer(floats(mine)), pointer(target), count, 7, comm, on))
        assert read(target, 3 * length) == whole
        target = floats([9.0] * length * rank + mine + [9.0] * length * (2 - rank))
        ok(nccl.ncclAllGather(pointer(target + 4 * rank * length), pointer(target), count, 7, comm, on))
        assert read(target, 3 * length) == whole
        # Reduce-scatter, apart and in place: block b is 10 b + rank.
        blocks = [10.0 * block + rank for block in range(ranks) for _ in range(length)]
        source, target = floats(blocks), alloc(4 * length)
        ok(nccl.ncclReduceScatter(pointer(source), pointer(target), count, 7, SUM, comm, on))
        assert read(target, length) == [30.0 * rank + 3] * length
        assert read(source, 3 * length) == blocks
        place = source + 4 * rank * length
        ok(nccl.ncclReduceScatter(pointer(source), pointer(place), count, 7, MAX, comm, on))
        assert read(place, length) == [10.0 * rank + 2] * length
        # Reduce: only the root's buffer is written, and only the root needs one.
        target = floats([9.0] * length)
        ok(nccl.ncclReduce(pointer(floats(mine)), pointer(target), count, 7, SUM, 1, comm, on))
        assert read(target, length) == [3.0 if rank == 1 else 9.0] * length
        ok(nccl.ncclReduce(pointer(target), pointer(target if rank == 2 else 0), count, 7, MIN, 2, comm, on))
        assert read(target, length) == [3.0 if rank > 0 else 9.0] * length
    for call, arguments in ((nccl.ncclReduce, (SUM, 0)), (nccl.ncclAllGather, ()), (nccl.ncclReduceScatter, (SUM,))):
        assert call(pointer(0), pointer(0), c_size_t(0), 40, *arguments, comm, on) == 4, "no such type"
    assert nccl.ncclReduce(pointer(0), pointer(0), c_size_t(0), 7, SUM, 3, comm, on) == 4, "no such root"
    assert nccl.ncclReduce(pointer(0), pointer(0), c_size_t(0), 7, 99, 0, comm, on) == 4, "no such operator"
    ok(nccl.ncclCommDestroy(comm))


def _messages_rank(rank: int, pipes: list[Connection]) -> None:
    """Messages: all pairs in a group, one pair alone while the third rank does nothing, and what is refused."""
    start(rank)
    comm, on, ranks = join(rank, 3, unique_id(rank, pipes)), stream(), 3
    for length in (1, 50_000):
        source, target, count = upload(bytes([rank]) * 3 * length), alloc(3 * length), c_size_t(length)
        ok(nccl.ncclGroupStart())
        # In another order on each rank, one group holding a message of this rank to itself.
        for peer in range(ranks):
            ok(nccl.ncclSend(c_void_p(source + peer * length), count, 1, peer, comm, on))
        for peer in range(ranks):
            peer = (peer + rank) % ranks
            ok(nccl.ncclRecv(c_void_p(target + peer * length), count, 1, peer, comm, on))
        ok(nccl.ncclGroupEnd())
        ok(cuda.cuStreamSynchronize(on))
        assert download(target, 3 * length) == b"".join(bytes([peer]) * length for peer in range(ranks))
    # Outside a group, several in order, between two ranks; then one of all.
    for number in range(3):
        if rank == 0:
            ok(nccl.ncclSend(c_void_p(upload(bytes([number]) * 9)), c_size_t(9), 1, 2, comm, on))
        if rank == 2:
            target = alloc(9)
            ok(nccl.ncclRecv(c_void_p(target), c_size_t(9), 1, 0, comm, on))
            ok(cuda.cuStreamSynchronize(on))
            assert download(target, 9) == bytes([number]) * 9
    data = c_void_p(upload(struct.pack("f", rank)))
    ok(nccl.ncclAllReduce(data, data, c_size_t(1), 7, SUM, comm, on))
    ok(cuda.cuStreamSynchronize(on))
    assert struct.unpack("f", download(data.value or 0, 4)) == (3,)
    one = c_size_t(1)
    assert nccl.ncclSend(data, one, 7, 3, comm, on) == 4, "no such rank"
    assert nccl.ncclRecv(data, one, 7, -1, comm, on) == 4
    assert nccl.ncclSend(data, one, 40, 1, comm, on) == 4, "no such type"
    assert nccl.ncclSend(data, one, 7, rank, comm, on) == 5, "nobody receives it"
    assert b"to itself" in nccl.ncclGetLastError(comm)


def _messages_differ_rank(rank: int, pipes: list[Connection]) -> None:
    start(rank)
    comm = join(rank, 2, unique_id(rank, pipes))
    data = c_void_p(alloc(16))
    if rank == 0:
        ok(nccl.ncclSend(data, c_size_t(2), 7, 1, comm, None))
    else:
        ok(nccl.ncclRecv(data, c_size_t(4), 7, 0, comm, None))
    ok(cuda.cuStreamSynchronize(None))


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
blocks, messages, aborts_messages = _run(3, _blocks_rank), _run(3, _messages_rank), _run(2, _messages_differ_rank)
slices, one_fails = _run(3, _slices_rank), _run(2, _one_fails_rank)
same_device, aborts_differ = _run(2, _same_device_rank), _run(2, _differ_rank)

if __name__ == "__main__":
    globals()[sys.argv[1]]()
