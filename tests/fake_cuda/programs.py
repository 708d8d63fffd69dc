"""Programs of tests/single/test_fake_cuda.py, each run in its own process: ``python programs.py NAME``.

A program checks the fake driver and prints nothing on success. Programs named ``aborts_*`` must be aborted.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from multiprocessing.connection import Connection
from pathlib import Path

from fake import (
    PTX,
    Handle,
    Work,
    alloc,
    average,
    big,
    counters,
    cuda,
    download,
    event,
    function,
    launch,
    ok,
    pinned,
    poke,
    start,
    stream,
    together,
    upload,
)

MIB = 1 << 20


def errors() -> None:
    value, context = c_int(), c_void_p()
    ok(cuda.cuDriverGetVersion(byref(value)))
    assert value.value == 13000
    assert cuda.cuDeviceGetCount(byref(value)) == 3
    assert cuda.cuMemAlloc_v2(byref(c_ulonglong()), c_size_t(1)) == 3
    ok(cuda.cuInit(0))
    assert cuda.cuMemAlloc_v2(byref(c_ulonglong()), c_size_t(1)) == 201
    assert cuda.cuDeviceGet(byref(value), 1) == 101
    ok(cuda.cuDevicePrimaryCtxRetain(byref(context), 0))
    ok(cuda.cuCtxPushCurrent_v2(context))
    assert cuda.cuMemAlloc_v2(byref(c_ulonglong()), c_size_t(1 << 40)) == 2
    assert cuda.cuStreamQuery(c_void_p(4711)) == 400
    for attribute, expected in ((75, 9), (76, 1), (16, 4), (1, 1024), (92, 1), (121, 1), (122, 1)):
        ok(cuda.cuDeviceGetAttribute(byref(value), attribute, 0))
        assert value.value == expected, attribute
    name = ctypes.c_char_p()
    ok(cuda.cuGetErrorName(600, byref(name)))
    assert name.value == b"CUDA_ERROR_NOT_READY"
    assert cuda.cuGetErrorName(12345, byref(name)) == 1
    # The kernel must exist in the module's text and in the fake driver.
    module, found = c_void_p(), c_void_p()
    ok(cuda.cuModuleLoadData(byref(module), PTX.replace("average_i8", "average_i9").encode()))
    assert cuda.cuModuleGetFunction(byref(found), module, b"average_i8") == 500
    assert cuda.cuModuleGetFunction(byref(found), module, b"average_i9") == 500
    ok(cuda.cuModuleGetFunction(byref(found), module, b"average_u8"))
    ok(cuda.cuModuleUnload(module))
    assert launch(found, Work()) == 400
    # A forked process has not called cuInit.
    if os.fork() == 0:
        os._exit(cuda.cuMemGetInfo_v2(None, None))
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 3


def settings() -> None:
    """Needs FAKE_CUDA_DEVICES=2 FAKE_CUDA_NO_IPC=1 FAKE_CUDA_NO_MEMOPS=1 FAKE_CUDA_DRIVER=12020."""
    value = c_int()
    ok(cuda.cuDriverGetVersion(byref(value)))
    assert value.value == 12020
    start(1)
    ok(cuda.cuDeviceGetCount(byref(value)))
    assert value.value == 2
    ok(cuda.cuDeviceGetAttribute(byref(value), 92, 1))
    assert value.value == 0
    memory = alloc(4)
    assert cuda.cuIpcGetMemHandle(byref(Handle()), big(memory)) == 801
    assert cuda.cuStreamWriteValue32_v2(None, big(memory), 1, 0) == 801
    ok(cuda.cuPointerGetAttribute(byref(value), 9, big(memory)))
    assert value.value == 1


def no_device() -> None:
    """Needs FAKE_CUDA_DEVICES=0."""
    assert cuda.cuInit(0) == 100


def pointers() -> None:
    start()
    memory, other, host = alloc(100), alloc(100), pinned(100)
    kind, identity, base, size = c_uint(), c_ulonglong(), c_ulonglong(), c_size_t()

    def identity_of(address: int) -> int:
        ok(cuda.cuPointerGetAttribute(byref(identity), 7, big(address)))
        return identity.value

    for address, expected in ((memory, 2), (memory + 99, 2), (host, 1), (host + (1 << 60), 1)):
        ok(cuda.cuPointerGetAttribute(byref(kind), 2, big(address)))
        assert kind.value == expected
    local = ctypes.create_string_buffer(100)
    assert cuda.cuPointerGetAttribute(byref(kind), 2, big(ctypes.addressof(local))) == 1
    assert cuda.cuPointerGetAttribute(byref(kind), 2, big(memory + 100)) == 1
    assert cuda.cuPointerGetAttribute(byref(kind), 3, big(memory)) == 1
    ok(cuda.cuMemGetAddressRange_v2(byref(base), byref(size), big(memory + 7)))
    assert (base.value, size.value) == (memory, 100)
    first = identity_of(memory)
    assert first not in (identity_of(other), identity_of(host))
    assert first == identity_of(memory + 50)
    ok(cuda.cuMemFree_v2(big(memory)))
    assert cuda.cuMemFree_v2(big(memory)) == 1
    assert identity_of(alloc(100)) != first
    ok(cuda.cuMemHostRegister_v2(local, c_size_t(100), 0))
    assert cuda.cuMemHostRegister_v2(local, c_size_t(1), 0) == 712
    ok(cuda.cuMemHostGetDevicePointer_v2(byref(base), ctypes.byref(local, 3), 0))
    assert base.value == ctypes.addressof(local) + 3 + (1 << 60)
    ok(cuda.cuMemHostUnregister(local))
    assert cuda.cuMemHostUnregister(local) == 713
    assert cuda.cuMemHostRegister_v2(c_void_p(4096), c_size_t(100), 0) == 1, "nothing is there"


def registering() -> None:
    """Only file pages in shared memory can be pinned. Needs /var/tmp on a disk."""
    start()

    def register(memory: mmap.mmap) -> int:
        address = c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
        code = int(cuda.cuMemHostRegister_v2(address, c_size_t(4096), 0))
        if code == 0:
            ok(cuda.cuMemHostUnregister(address))
        return code

    for folder, code in (("/var/tmp", 1), ("/dev/shm", 0)):
        with tempfile.TemporaryFile(dir=folder) as unlinked, tempfile.NamedTemporaryFile(dir=folder) as named:
            for file in (unlinked, named):
                file.truncate(8192)
                assert register(mmap.mmap(file.fileno(), 8192)) == code, (folder, file)
                # A private mapping has separate pages.
                ok(register(mmap.mmap(file.fileno(), 8192, mmap.MAP_PRIVATE)))
    memory = os.memfd_create("pinned")
    os.truncate(memory, 8192)
    ok(register(mmap.mmap(memory, 8192)))
    ok(register(mmap.mmap(-1, 8192)))
    ok(register(mmap.mmap(-1, 8192, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)))


def kernels() -> None:
    start()
    cases: dict[str, tuple[str, list[float], list[float], list[float]]] = {
        "average_f32": ("f", [1.5, 2, 6], [2.5, 4, -6], [2, 3, 0]),
        "average_f64": ("d", [1.5], [2.5], [2]),
        "average_f16": ("e", [1.5, 65504], [2.5, 65504], [2, 65504]),
        "average_f16_precise": ("e", [1.5], [2.5], [2]),
        "average_i8": ("b", [-128, 3, -3], [-128, 4, -4], [-128, 3, -3]),
        "average_u8": ("B", [255, 3], [255, 4], [255, 3]),
        "average_i32": ("i", [2**31 - 1], [2**31 - 3], [2**31 - 2]),
        "average_i64": ("q", [2**63 - 1], [2**63 - 1], [2**63 - 1]),
    }
    for name, (code, one, two, mean) in cases.items():
        sources = [upload(struct.pack(f"{len(one)}{code}", *values)) for values in (one, two)]
        targets = [upload(bytes(8 * len(one))) for _ in range(2)]
        ok(launch(function(name), average(sources, targets[:1], len(one), 2)))
        ok(launch(function(name), average(sources, targets[1:], len(one), 2, inside=True)))
        size = struct.calcsize(code) * len(one)
        for target in targets:
            assert struct.unpack(f"{len(one)}{code}", download(target, size)) == tuple(mean), name
    data = os.urandom(10007)
    targets = [alloc(len(data)), alloc(len(data))]
    ok(launch(function("copy_bytes"), average([upload(data)], targets, len(data), 1), grid=3, block=256))
    assert [download(target, len(data)) for target in targets] == [data, data]
    assert launch(function("copy_bytes"), Work(), block=512) == 1


def stop() -> None:
    """A kernel accesses no memory, not even freed memory, after its stop flag is set; the only block reads copy 0.

    One that fills writes ones to its targets.
    """
    start()
    word, source, target = pinned(512 * 128), upload(struct.pack("2f", 1, 3)), upload(struct.pack("2f", 7, 7))
    number, device = ctypes.c_uint.from_address(word), c_ulonglong()
    ok(cuda.cuMemHostGetDevicePointer_v2(byref(device), c_void_p(word), 0))
    number.value = 1
    ok(launch(function("average_f32"), average([source], [target], 2, 1, device.value)))
    ok(launch(function("average_f32"), average([4096], [target], 2, 1, device.value)))
    assert struct.unpack("2f", download(target, 8)) == (7, 7)
    number.value = 0
    ok(launch(function("average_f32"), average([source], [target], 2, 1, device.value)))
    assert struct.unpack("2f", download(target, 8)) == (1, 3)
    for sources, flag, expected in (([], 0, (1, 3)), ([source], 1, None), ([], 1, None), ([4096], 1, None)):
        number.value = flag
        ok(cuda.cuMemcpyHtoD_v2(big(target), struct.pack("2f", 1, 3), c_size_t(8)))
        ok(launch(function("copy_bytes"), average(sources, [target], 8, 1, device.value, fills=True)))
        assert download(target, 8) == (b"\xff" * 8 if expected is None else struct.pack("2f", *expected))


def count() -> None:
    start()
    before, host, on = counters(), pinned(8), stream()
    memory, identity = alloc(1000), c_ulonglong()
    ok(cuda.cuPointerGetAttribute(byref(identity), 7, big(memory)))
    ok(cuda.cuMemcpyHtoDAsync_v2(big(memory), c_void_p(host), c_size_t(8), on))
    ok(launch(function("copy_bytes"), average([memory], [memory + 500], 8, 1), on))
    ok(cuda.cuStreamSynchronize(on))
    ok(cuda.cuMemFree_v2(big(memory)))
    # The lists were copied to the device for the launch.
    assert [now - then for now, then in zip(counters(), before, strict=True)] == [2, 32, 1, 2, 1]


def events() -> None:
    """Two streams that alternate, ordered only by events. Works with any FAKE_CUDA_DELAY_US."""
    start()
    count, one, two, there, back = 1000, stream(), stream(), event(), event()
    ok(cuda.cuStreamWaitEvent(two, there, 0))
    ok(cuda.cuEventSynchronize(there))
    ok(cuda.cuEventQuery(there))
    host, result, middle, device = pinned(4 * count), pinned(4 * count), alloc(4 * count), alloc(4 * count)
    source = (ctypes.c_float * count).from_address(host)
    kernel, work = function("average_f32"), average([device], [middle], count, 2)
    for turn in range(1, 20):
        source[:] = [float(turn)] * count
        ok(cuda.cuMemcpyHtoDAsync_v2(big(device), c_void_p(host), c_size_t(4 * count), one))
        ok(cuda.cuEventRecord(there, one))
        ok(cuda.cuStreamWaitEvent(two, there, 0))
        # The wait refers to the record above, not to this later one, which depends on the wait.
        ok(cuda.cuStreamWaitEvent(one, back, 0))
        ok(launch(kernel, work, two))
        ok(cuda.cuEventRecord(back, two))
        ok(cuda.cuStreamWaitEvent(one, back, 0))
        ok(cuda.cuEventRecord(there, one))
        ok(cuda.cuMemcpyDtoHAsync_v2(c_void_p(result), big(middle), c_size_t(4 * count), one))
        ok(cuda.cuStreamSynchronize(one))
        ok(cuda.cuStreamQuery(one))
        ok(cuda.cuEventQuery(there))
        assert (ctypes.c_float * count).from_address(result)[:] == [turn / 2] * count
    status = c_int()
    ok(cuda.cuStreamBeginCapture_v2(one, 0))
    ok(cuda.cuStreamIsCapturing(one, byref(status)))
    assert status.value == 1
    assert cuda.cuStreamSynchronize(one) == 900
    assert cuda.cuStreamWaitEvent(one, back, 0) == 905  # recorded before
    ok(cuda.cuEventRecord(there, one))
    assert cuda.cuEventQuery(there) in (900, 907)
    ok(cuda.cuStreamWaitEvent(two, there, 0))  # takes part from now on
    ok(launch(kernel, work, two))
    ok(cuda.cuEventRecord(back, two))
    ok(cuda.cuStreamWaitEvent(one, back, 0))
    graph, executable = c_void_p(), c_void_p()
    ok(cuda.cuStreamEndCapture(one, byref(graph)))
    ok(cuda.cuStreamIsCapturing(two, byref(status)))
    assert status.value == 0
    ok(cuda.cuGraphInstantiateWithFlags(byref(executable), graph, big(0)))
    for _ in range(3):
        ok(cuda.cuGraphLaunch(executable, one))
    ok(cuda.cuStreamSynchronize(one))
    ok(cuda.cuGraphExecDestroy(executable))
    ok(cuda.cuGraphDestroy(graph))
    # What another stream was given must come back.
    ok(cuda.cuStreamBeginCapture_v2(one, 0))
    ok(cuda.cuEventRecord(there, one))
    ok(cuda.cuStreamWaitEvent(two, there, 0))
    assert cuda.cuStreamEndCapture(one, byref(graph)) == 904
    ok(cuda.cuStreamDestroy_v2(one))
    assert cuda.cuStreamSynchronize(one) == 400


def asynchronous() -> None:
    """A call returns before its operation runs."""
    start()
    flag, on, mark = upload(bytes(4)), stream(), event()
    ok(cuda.cuStreamWaitValue32_v2(on, big(flag), 1, 0))
    ok(cuda.cuEventRecord(mark, on))
    time.sleep(0.05)
    assert cuda.cuStreamQuery(on) == 600
    assert cuda.cuEventQuery(mark) == 600
    ok(cuda.cuStreamWriteValue32_v2(c_void_p(2), big(flag), 1, 0))
    ok(cuda.cuEventSynchronize(mark))
    for flags in (1, 2):
        assert cuda.cuStreamWriteValue32_v2(on, big(flag), 1, flags) == 1
    # GEQ is cyclic: values 2^31 or more ahead count as smaller.
    for value, wanted in ((0x80000003, 2), (0xFFFFFFF0, 5)):
        ok(cuda.cuStreamWriteValue32_v2(None, big(flag), value, 0))
        ok(cuda.cuStreamSynchronize(None))
        ok(cuda.cuStreamWaitValue32_v2(on, big(flag), wanted, 0))
        time.sleep(0.02)
        assert cuda.cuStreamQuery(on) == 600
        ok(cuda.cuStreamWriteValue32_v2(None, big(flag), wanted + 5, 0))
        ok(cuda.cuStreamSynchronize(on))


def one_queue() -> None:
    """A waiting stream blocks later work on other streams. Needs FAKE_CUDA_ONE_QUEUE=1."""
    start()
    flag, memory, before, first, second = upload(bytes(4)), alloc(8), event(), stream(), stream()
    ok(cuda.cuEventRecord(before, second))
    ok(cuda.cuStreamWaitValue32_v2(first, big(flag), 1, 0))
    ok(cuda.cuMemsetD8Async(big(memory), 0, c_size_t(8), second))
    ok(cuda.cuEventSynchronize(before))
    time.sleep(0.05)
    assert cuda.cuStreamQuery(second) == 600
    poke(flag, 1)
    ok(cuda.cuStreamSynchronize(second))
    ok(cuda.cuStreamQuery(first))
    for each in (first, second, first, second):
        ok(launch(function("copy_bytes"), average([memory], [memory + 4], 4, 1), each))
    ok(cuda.cuStreamSynchronize(second))


def take_name(own: socket.socket, name: str) -> None:
    """Binds a socket to a name that another process may use briefly."""
    while True:
        try:
            own.bind(name)
            return
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            time.sleep(0.001)


def _slices_rank(rank: int, pipes: list[Connection]) -> None:
    start()
    (pipe,), on, kernel = pipes, stream(), function("copy_bytes")
    work = average([upload(bytes(MIB))], [alloc(MIB)], 30000, 1)
    if rank == 1:
        pipe.recv()
        ok(launch(kernel, work, on))
        time.sleep(0.05)
        assert cuda.cuStreamQuery(on) == 600, "rank 0 has the GPU"
        upload(b"a copy needs no slice")
        pipe.send("waits")
        ok(cuda.cuStreamSynchronize(on))
    else:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as slice_of_gpu:
            take_name(slice_of_gpu, "\0fake_cuda.kernels.0")
            pipe.send("taken")
            pipe.recv()
    for _ in range(50):
        ok(launch(kernel, work, on))
    ok(cuda.cuStreamSynchronize(on))


def slices() -> None:
    """Kernels of two processes are time-sliced. Needs FAKE_CUDA_TIME_SLICES=1."""
    together(2, _slices_rank)


def waiting_calls() -> None:
    """Some calls wait for all streams. Needs FAKE_CUDA_WAITING_CALLS=1."""
    start()
    memory, host, local = alloc(8), pinned(8), ctypes.create_string_buffer(8)
    ok(cuda.cuMemHostRegister_v2(local, c_size_t(8), 0))
    for call in (
        lambda: ok(cuda.cuMemFree_v2(big(memory))),
        lambda: ok(cuda.cuMemFreeHost(c_void_p(host))),
        lambda: ok(cuda.cuMemHostUnregister(local)),
        lambda: pinned(8),
        lambda: function("copy_bytes"),
    ):
        flag, on = upload(bytes(4)), stream()
        ok(cuda.cuStreamWaitValue32_v2(on, big(flag), 1, 0))

        def body(call: Callable[[], object] = call) -> None:
            start()
            call()

        thread = threading.Thread(target=body)
        thread.start()
        alloc(8)  # does not
        thread.join(0.05)
        assert thread.is_alive()
        poke(flag, 1)
        thread.join()
        ok(cuda.cuStreamQuery(on))


def faults() -> None:
    """After an invalid access every call fails, and no call hangs. Needs FAKE_CUDA_FAULTS=1."""
    start()
    short, flag, waiting, mark, on = upload(bytes(396)), upload(bytes(4)), stream(), event(), stream()
    kernel, work, host = function("average_f32"), average([upload(bytes(400)), short], [short], 100, 2), pinned(8)
    name = ctypes.c_char_p()
    ok(cuda.cuStreamWaitValue32_v2(waiting, big(flag), 1, 0))
    ok(cuda.cuEventRecord(mark, waiting))
    ok(launch(kernel, work, on))
    assert cuda.cuStreamSynchronize(on) == 700
    assert cuda.cuEventSynchronize(mark) == 700
    assert cuda.cuStreamSynchronize(waiting) == 700
    for code in (
        cuda.cuInit(0),
        cuda.cuCtxGetCurrent(byref(c_void_p())),
        cuda.cuMemAlloc_v2(byref(c_ulonglong()), c_size_t(8)),
        cuda.cuMemFree_v2(big(flag)),
        cuda.cuMemFreeHost(c_void_p(host)),
        cuda.cuMemcpyDtoH_v2(c_void_p(host), big(flag), c_size_t(4)),
        cuda.cuIpcGetMemHandle(byref(Handle()), big(flag)),
        cuda.cuEventQuery(mark),
        cuda.cuStreamQuery(on),
        cuda.cuStreamWaitEvent(on, mark, 0),
        launch(kernel, work, on),
    ):
        assert code == 700
    ok(cuda.cuGetErrorName(700, byref(name)))
    assert name.value == b"CUDA_ERROR_ILLEGAL_ADDRESS"


def shutdown() -> None:
    """Exit handlers registered before the driver's start run after its shutdown."""
    libc = ctypes.CDLL(None)

    @ctypes.CFUNCTYPE(None, c_int, c_void_p)
    def handler(_code: int, _argument: c_void_p) -> None:
        codes = [
            cuda.cuInit(0),
            cuda.cuDriverGetVersion(byref(c_int())),
            cuda.cuMemAlloc_v2(byref(c_ulonglong()), c_size_t(8)),
            cuda.cuStreamSynchronize(None),
            cuda.cuThreadExchangeStreamCaptureMode(byref(c_int())),
        ]
        if codes == [4] * len(codes):
            os._exit(0)

    assert libc.on_exit(handler, None) == 0
    start()
    libc.exit(1)


def machine_code() -> None:
    """Loads NVRTC's output of means.cu for 9.0 and for 8.0. Needs FAKE_CUDA_CAPABILITY=90, and both files."""
    start()
    value, module, kernel = c_int(), c_void_p(), c_void_p()
    for attribute, expected in ((75, 9), (76, 0)):
        ok(cuda.cuDeviceGetAttribute(byref(value), attribute, 0))
        assert value.value == expected
    fitting, older = (Path(name).read_bytes() for name in sys.argv[2:])
    assert cuda.cuModuleLoadData(byref(module), older) == 209
    ok(cuda.cuModuleLoadData(byref(module), fitting))
    assert cuda.cuModuleGetFunction(byref(kernel), module, b"sum_f32") == 500
    ok(cuda.cuModuleGetFunction(byref(kernel), module, b"average_f32"))
    sources = [upload(struct.pack("2f", *values)) for values in ((1, 2), (3, 6))]
    ok(launch(kernel, average(sources, sources[:1], 2, 2)))
    assert struct.unpack("2f", download(sources[0], 8)) == (2, 4)


def stale() -> None:
    """The next start removes files of killed processes, and keeps those of live ones."""
    child = os.fork()
    if child == 0:
        start()
        alloc(10)
        os.kill(os.getpid(), 9)
    os.wait()
    left = list(Path("/dev/shm").glob(f"fake_cuda.{child}.*"))
    assert len(left) == 1
    start()
    assert not left[0].exists()
    alloc(10)
    assert len(list(Path("/dev/shm").glob(f"fake_cuda.{os.getpid()}.*"))) == 1


def aborts_host_access() -> None:
    start()
    ctypes.string_at(alloc(10), 1)


def aborts_unpinned() -> None:
    start()
    host = ctypes.create_string_buffer(10)
    cuda.cuMemcpyHtoDAsync_v2(big(alloc(10)), host, c_size_t(10), None)


def aborts_beyond_memory() -> None:
    start()
    cuda.cuMemsetD8Async(big(alloc(10)), 0, c_size_t(11), None)


def aborts_freed_in_use() -> None:
    start()
    flag, memory, on = upload(bytes(4)), alloc(10), stream()
    ok(cuda.cuStreamWaitValue32_v2(on, big(flag), 1, 1))
    ok(cuda.cuMemsetD8Async(big(memory), 0, c_size_t(10), on))
    ok(cuda.cuMemFree_v2(big(memory)))
    ok(cuda.cuStreamWriteValue32_v2(None, big(flag), 1, 0))
    cuda.cuStreamSynchronize(on)


def aborts_kernel_beyond_memory() -> None:
    start()
    sources = [upload(bytes(400)), upload(bytes(396))]
    ok(launch(function("average_f32"), average(sources, sources[:1], 100, 2)))
    cuda.cuStreamSynchronize(None)


def aborts_synchronize() -> None:
    start()
    cuda.cuCtxSynchronize()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
