"""Programs of tests/single/test_fake_cuda.py about memory of other processes and devices, run like programs.py."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from ctypes import byref, c_int, c_size_t, c_ulonglong, c_void_p
from multiprocessing.connection import Connection

from fake import (
    Chunks,
    Handle,
    alloc,
    alloc_async,
    alloc_managed,
    average,
    big,
    counters,
    cuda,
    download,
    function,
    handle_of,
    launch,
    ok,
    pinned,
    start,
    stream,
    together,
    upload,
)

MIB = 1 << 20


def _ipc_rank(rank: int, pipes: list[Connection]) -> None:
    """Rank 0 owns memory and two flags, rank 1 works on them; each waits for the other only through stream values."""
    start(rank)
    data, on, (pipe,) = bytes(range(256)) * (MIB // 256), stream(), pipes
    size, host, handle, flags = c_size_t(MIB), pinned(MIB), Handle(), c_ulonglong()
    if rank == 0:
        memory = alloc(MIB + 8)
        flags = big(memory + MIB)
        ok(cuda.cuMemsetD8Async(flags, 0, c_size_t(8), on))
        ok(cuda.cuStreamSynchronize(on))
        assert cuda.cuIpcGetMemHandle(byref(handle), big(memory + 5)) == 1, "not the start of an allocation"
        ok(cuda.cuIpcGetMemHandle(byref(handle), big(memory)))
        assert cuda.cuIpcOpenMemHandle_v2(byref(c_ulonglong()), handle, 1) == 201
        pipe.send(bytes(handle))
        pipe.recv()
        ctypes.memmove(host, data, MIB)
        for turn in range(1, 6):
            ok(cuda.cuMemcpyHtoDAsync_v2(big(memory), c_void_p(host), size, on))
            ok(cuda.cuStreamWriteValue32_v2(on, flags, turn, 0))
            ok(cuda.cuStreamWaitValue32_v2(on, big(flags.value + 4), turn, 1))
        ok(cuda.cuMemcpyDtoHAsync_v2(c_void_p(host), big(memory), size, on))
        ok(cuda.cuStreamSynchronize(on))
        assert ctypes.string_at(host, MIB) == b"\7" * MIB
        pipe.recv()
        ok(cuda.cuMemFree_v2(big(memory)))
        pipe.send("freed")
        return
    handle = Handle.from_buffer_copy(pipe.recv())
    opened, again = c_ulonglong(), c_ulonglong()
    ok(cuda.cuIpcOpenMemHandle_v2(byref(opened), handle, 1))
    ok(cuda.cuIpcOpenMemHandle_v2(byref(again), handle, 1))
    assert opened.value == again.value
    kind = c_int()
    ok(cuda.cuPointerGetAttribute(byref(kind), 9, opened))
    assert kind.value == 0
    flags = big(opened.value + MIB)
    mine, targets = alloc(MIB), []
    pipe.send("ready")
    for turn in range(1, 6):
        targets.append(pinned(MIB))
        ok(cuda.cuStreamWaitValue32_v2(on, flags, turn, 0))
        ok(cuda.cuMemcpyDtoDAsync_v2(big(mine), opened, size, on))
        ok(cuda.cuMemcpyDtoHAsync_v2(c_void_p(targets[-1]), big(mine), size, on))
        ok(cuda.cuMemsetD8Async(opened, 7, size, on))
        ok(cuda.cuStreamWriteValue32_v2(on, big(flags.value + 4), turn, 0))
    ok(cuda.cuStreamSynchronize(on))
    assert [ctypes.string_at(target, MIB) == data for target in targets] == [True] * 5
    ok(cuda.cuIpcCloseMemHandle(opened))
    ok(cuda.cuIpcCloseMemHandle(opened))
    assert cuda.cuIpcCloseMemHandle(opened) == 1
    pipe.send("done")
    pipe.recv()
    assert cuda.cuIpcOpenMemHandle_v2(byref(opened), handle, 1) == 1


def ipc() -> None:
    """Needs FAKE_CUDA_DEVICES=2."""
    together(2, _ipc_rank)


def _overlap_rank(rank: int, pipes: list[Connection]) -> None:
    """Rank 0 frees memory that rank 1 has open, and gets new memory at the same address."""
    start()
    (pipe,), opened, again = pipes, c_ulonglong(), c_ulonglong()
    if rank == 0:
        memory, other = alloc(MIB), alloc(MIB)
        pipe.send([handle_of(memory), handle_of(other)])
        pipe.recv()
        ok(cuda.cuMemFree_v2(big(memory)))
        small, middle = alloc(1 << 16), alloc(1 << 16)
        assert (small, middle) == (memory, memory + (1 << 16)), "freed addresses come again at once"
        pipe.send([handle_of(small), handle_of(middle)])
        pipe.recv()
        return
    old, other = (Handle.from_buffer_copy(each) for each in pipe.recv())
    for handle in (old, old, other):
        ok(cuda.cuIpcOpenMemHandle_v2(byref(opened), handle, 1))
    pipe.send("opened")
    small, middle = (Handle.from_buffer_copy(each) for each in pipe.recv())
    ok(cuda.cuIpcOpenMemHandle_v2(byref(again), old, 1))
    for _ in range(3):
        assert cuda.cuIpcOpenMemHandle_v2(byref(opened), small, 1) == 208
        assert cuda.cuIpcOpenMemHandle_v2(byref(opened), middle, 1) == 208
        ok(cuda.cuIpcCloseMemHandle(again))
    for handle in (middle, small, middle):
        ok(cuda.cuIpcOpenMemHandle_v2(byref(opened), handle, 1))
    pipe.send("done")


def overlap() -> None:
    """Memory at the address of older memory that is still open cannot be opened."""
    together(2, _overlap_rank)


def _freed_rank(rank: int, pipes: list[Connection]) -> None:
    start()
    (pipe,), opened, free = pipes, c_ulonglong(), c_size_t()
    if rank == 1:
        for handle in (Handle.from_buffer_copy(each) for each in pipe.recv()):
            ok(cuda.cuIpcOpenMemHandle_v2(byref(opened), handle, 1))
        pipe.send("opened")
        pipe.recv()
        assert download(opened.value, 8) == b"contents", "it stays until it is closed"
        ok(cuda.cuIpcCloseMemHandle(opened))
        pipe.send("closed one")
        pipe.recv()
        os.kill(os.getpid(), 9)

    def in_use() -> int:
        ok(cuda.cuMemGetInfo_v2(byref(free), None))
        assert counters()[1] == (8 << 30) - free.value
        return counters()[1]

    before = in_use()
    one, two = alloc(2 * MIB), upload(b"contents" * (MIB // 8))
    pipe.send([handle_of(one), handle_of(two)])
    pipe.recv()
    for address in (one, two):
        ok(cuda.cuMemFree_v2(big(address)))
    assert in_use() == before + 3 * MIB
    pipe.send("freed")
    pipe.recv()
    assert in_use() == before + 2 * MIB
    pipe.send("end")
    while in_use() != before:
        time.sleep(0.01)


def freed() -> None:
    """Freed memory stays allocated while other processes have it open."""
    together(2, _freed_rank, killed={1})


def handles() -> None:
    """Only memory from cuMemAlloc has an IPC handle."""
    start()
    on, managed, own, chunked = stream(), alloc_managed(MIB), alloc_async(MIB), Chunks(6 * MIB)
    from_pool, pool = c_ulonglong(), c_void_p()
    ok(cuda.cuDeviceGetDefaultMemPool(byref(pool), 0))
    ok(cuda.cuMemAllocFromPoolAsync(byref(from_pool), c_size_t(8), pool, on))
    chunked.grow()
    chunked.grow()
    start_of_range, size, handle = c_ulonglong(), c_size_t(), Handle()
    plain = alloc(8)
    for address, capable in ((plain, 1), (managed, 0), (own, 0), (from_pool.value, 0), (chunked.address, 0)):
        assert cuda.cuIpcGetMemHandle(byref(handle), big(address)) == 1 - capable
        value = c_int(-1)
        ok(cuda.cuPointerGetAttribute(byref(value), 10, big(address)))
        assert value.value == capable
        ok(cuda.cuPointerGetAttribute(byref(value), 8, big(address)))
        assert value.value == (address == managed)
    assert cuda.cuStreamWriteValue32_v2(on, big(managed), 1, 0) == 1
    # Each chunk is a separate allocation, but copies and kernels may cross chunks.
    ok(cuda.cuMemGetAddressRange_v2(byref(start_of_range), byref(size), big(chunked.address + 2 * MIB + 5)))
    assert (start_of_range.value, size.value) == (chunked.address + 2 * MIB, 2 * MIB)
    data, edge = os.urandom(MIB), chunked.address + 3 * MIB // 2
    ok(cuda.cuMemcpyHtoD_v2(big(edge), data, c_size_t(MIB)))
    ok(launch(function("copy_bytes"), average([edge], [managed], 30000, 1), on))
    ok(cuda.cuStreamSynchronize(on))
    assert download(managed, 30000) == data[:30000]
    assert download(edge, MIB) == data
    # A mapped chunk survives its release; an unmapped one is freed.
    before = counters()[1]
    chunked.shrink()
    assert counters()[1] == before - 2 * MIB
    chunked.grow()
    assert cuda.cuMemAddressFree(big(chunked.address), c_size_t(6 * MIB)) == 1
    chunked.free()
    for address in (managed, plain):
        ok(cuda.cuMemFree_v2(big(address)))
    for address in (own, from_pool.value):
        ok(cuda.cuMemFreeAsync(big(address), on))
    ok(cuda.cuStreamSynchronize(on))
    assert counters()[1] == before - 4 * MIB - 2 * MIB - 8 - 8


def _no_peers_rank(rank: int, pipes: list[Connection]) -> None:
    (pipe,), opened, can, other = pipes, c_ulonglong(), c_int(), c_void_p()
    start(1)
    ok(cuda.cuCtxGetCurrent(byref(other)))
    start(0)
    ok(cuda.cuDeviceCanAccessPeer(byref(can), 0, 1))
    assert can.value == 0
    assert cuda.cuCtxEnablePeerAccess(other, 0) == 217
    if rank == 0:
        pipe.send(handle_of(alloc(8)))
        pipe.recv()
        return
    handle = Handle.from_buffer_copy(pipe.recv())
    ok(cuda.cuIpcOpenMemHandle_v2(byref(opened), handle, 1))
    start(1)
    assert cuda.cuIpcOpenMemHandle_v2(byref(opened), handle, 1) == 217
    pipe.send("done")


def no_peers() -> None:
    """Needs FAKE_CUDA_DEVICES=2, and FAKE_CUDA_NO_PEERS=1 or FAKE_CUDA_MIG=2."""
    together(2, _no_peers_rank)


def aborts_peer() -> None:
    """Needs FAKE_CUDA_DEVICES=2."""
    start(1)
    source = upload(bytes(40))
    other = c_void_p()
    ok(cuda.cuCtxGetCurrent(byref(other)))
    start(0)
    ok(launch(function("copy_bytes"), average([upload(bytes(40))], [alloc(40)], 40, 1)))
    ok(cuda.cuStreamSynchronize(None))
    ok(cuda.cuCtxEnablePeerAccess(other, 0))
    assert cuda.cuCtxEnablePeerAccess(other, 0) == 704
    ok(launch(function("copy_bytes"), average([source], [alloc(40)], 40, 1)))
    ok(cuda.cuStreamSynchronize(None))
    start(1)
    target = alloc(40)
    start(0)
    source = alloc(40)
    start(1)
    ok(launch(function("copy_bytes"), average([source], [target], 40, 1)))
    cuda.cuStreamSynchronize(None)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
