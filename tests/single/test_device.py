"""The paths of calls on device memory with a fake CUDA driver and NCCL: results on 1 to 3 ranks, failures.

These tests cover the core's logic: matching, addresses, stream order, kernel arithmetic. tests/gpu runs on real GPUs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fake_cuda_env import PROGRAMS, environment
from launch import Finished, ending_together, launch, run

PEER_LOST = -6  # DL_COMM_ERROR_PEER_LOST
SLOW = {"FAKE_CUDA_DELAY_US": "300"}
# Settings that select each path.
PATHS = {
    "ipc": {},
    "ipc, the host waits": {"FAKE_CUDA_NO_MEMOPS": "1"},
    "ipc between GPUs": {"FAKE_CUDA_DEVICES": "3", "DL_COMM_GPU_PATH": "ipc"},
    "staged": {"FAKE_CUDA_NO_IPC": "1"},
    "staged in small chunks": {
        "DL_COMM_GPU_PATH": "staged",
        "DL_COMM_PIPELINE_CHUNK_KB": "16",
        "DL_COMM_NUM_CUDA_STREAMS": "2",
    },
    "nccl": {"FAKE_CUDA_DEVICES": "3"},
}


# Other behaviour of drivers, GPUs and NCCL, with the selected path.
DRIVERS = {
    "ipc, machine code": {"FAKE_CUDA_CAPABILITY": "90"},
    "ipc, pages on a disk": {"DL_COMM_SHM_DIR": "DISK"},
    "ipc, NCCL fails on a rank": {"FAKE_CUDA_DEVICES": "3", "FAKE_CUDA_NCCL_FAILS": "1"},
    "ipc, one queue": {"FAKE_CUDA_ONE_QUEUE": "1"},
    "ipc, time slices": {"FAKE_CUDA_TIME_SLICES": "1"},
    "ipc, calls that wait": {"FAKE_CUDA_WAITING_CALLS": "1"},
    "staged, pages on a disk": {"FAKE_CUDA_NO_IPC": "1", "DL_COMM_SHM_DIR": "DISK", "DL_COMM_CHUNK_KB": "64"},
    "staged, slices of a GPU": {"FAKE_CUDA_DEVICES": "3", "FAKE_CUDA_MIG": "3"},
    "staged, no peer access": {"FAKE_CUDA_DEVICES": "3", "FAKE_CUDA_NO_PEERS": "1", "FAKE_CUDA_NCCL_FAILS": "0"},
}
# Tests of test_arrays.py that cover each path.
WAYS = (
    "path or (same_bits and f4) or many_arrays or 65537-f4 or 2200001-f4 or broadcasts or freed or pool or 100-chunks "
    "or side_by_side"
)


def start(fake_cuda: Path, ranks: int, command: list[str], timeout: float, **settings: str) -> Finished:
    env = {**environment(fake_cuda), **settings}
    return launch(ranks, [sys.executable, *command], timeout, env)


@pytest.mark.parametrize(
    ("ranks", "path"),
    [
        pytest.param(ranks, path, marks=pytest.mark.heavy)
        for ranks, paths in {
            1: ["ipc"],
            2: ["ipc"],
            3: ["ipc", "nccl", "ipc, the host waits", "ipc between GPUs", "staged", "staged in small chunks"],
        }.items()
        for path in paths
    ],
    ids=str,
)
def test_results(fake_cuda: Path, ranks: int, path: str) -> None:
    settings = {**PATHS[path], **SLOW, "PATH_EXPECTED": path.split()[0].strip(",")}
    command = ["-m", "pytest", "-x", "-q", str(PROGRAMS / "test_arrays.py")]
    finished = start(fake_cuda, ranks, command, 200, **settings)
    assert finished.returncode == 0, finished.output
    assert not finished.left


@pytest.mark.parametrize(
    ("ranks", "path"),
    [(2, "ipc")]
    + [
        pytest.param(*each, marks=pytest.mark.heavy)
        for each in [
            (1, "nccl"),
            (2, "nccl"),
            (3, "nccl"),
            (3, "ipc"),
            (3, "staged"),
            (3, "ipc, the host waits"),
        ]
    ],
    ids=str,
)
def test_collectives(fake_cuda: Path, ranks: int, path: str) -> None:
    settings = {**PATHS[path], **SLOW, "PATH_EXPECTED": path.split(",")[0]}
    command = ["-m", "pytest", "-x", "-q", str(PROGRAMS / "test_collectives.py")]
    finished = start(fake_cuda, ranks, command, 300, **settings)
    assert finished.returncode == 0, finished.output
    assert not finished.left


@pytest.mark.parametrize(
    ("ranks", "path"),
    [(2, "nccl"), (2, "ipc")]
    + [pytest.param(*each, marks=pytest.mark.heavy) for each in [(1, "ipc"), (3, "nccl"), (2, "staged")]],
)
def test_graphs(fake_cuda: Path, ranks: int, path: str) -> None:
    command = ["-m", "pytest", "-x", "-q", str(PROGRAMS / "test_graphs.py")]
    finished = start(fake_cuda, ranks, command, 200, **PATHS[path], **SLOW, PATH_EXPECTED=path)
    assert finished.returncode == 0, finished.output
    assert not finished.left


@pytest.mark.heavy
def test_collectives_by_kernels_that_nvrtc_has_compiled(fake_cuda: Path, tmp_path: Path) -> None:
    for library in fake_cuda.iterdir():
        if "nvrtc" not in library.name:
            (tmp_path / library.name).symlink_to(library)
    command = ["-m", "pytest", "-x", "-q", str(PROGRAMS / "test_collectives.py")]
    cache = tmp_path / "cache"
    finished = start(
        tmp_path, 2, command, 500, FAKE_CUDA_CAPABILITY="90", PATH_EXPECTED="ipc", DL_COMM_CACHE=str(cache)
    )
    assert finished.returncode == 0, finished.output
    assert any(kept.stat().st_size > 100_000 for kept in (cache / "kernels").iterdir())


@pytest.mark.parametrize(
    ("ranks", "path", "which"),
    [(2, "ipc", "not of_every_type or float32")]
    + [
        pytest.param(*each, "", marks=pytest.mark.heavy)
        for each in [
            (1, "ipc"),
            (2, "ipc"),
            (3, "ipc"),
            (3, "nccl"),
            (3, "staged in small chunks"),
            (3, "ipc between GPUs"),
        ]
    ],
    ids=str,
)
def test_arrays_of_other_libraries(fake_cuda: Path, ranks: int, path: str, which: str) -> None:
    settings = {**PATHS[path], **SLOW, "PATH_EXPECTED": path.split()[0]}
    command = ["-m", "pytest", "-x", "-q", "-k", which, str(PROGRAMS / "test_dlpack.py")]
    finished = start(fake_cuda, ranks, command, 300, **settings)
    assert finished.returncode == 0, finished.output
    assert not finished.left


@pytest.mark.parametrize(
    ("ranks", "path"),
    [(3, "nccl"), (2, "ipc")]
    + [
        pytest.param(*each, marks=pytest.mark.heavy)
        for each in [(1, "nccl"), (2, "nccl"), (3, "ipc"), (3, "ipc, the host waits"), (3, "staged in small chunks")]
    ],
    ids=str,
)
def test_ranks_that_join(fake_cuda: Path, ranks: int, path: str) -> None:
    command = ["-m", "pytest", "-x", "-q", str(PROGRAMS / "test_join.py")]
    finished = start(fake_cuda, ranks, command, 200, **PATHS[path], **SLOW)
    assert finished.returncode == 0, finished.output
    assert not finished.left


@pytest.mark.heavy
@pytest.mark.parametrize(("ranks", "driver"), [(2, "ipc"), *((3, driver) for driver in DRIVERS)])
def test_results_with_other_drivers(fake_cuda: Path, tmp_path: Path, ranks: int, driver: str) -> None:
    """The tests that cover a path, on each driver."""
    settings = {name: str(tmp_path) if value == "DISK" else value for name, value in DRIVERS.get(driver, {}).items()}
    settings |= {**SLOW, "PATH_EXPECTED": driver.split(",")[0]}
    command = ["-m", "pytest", "-x", "-q", "-k", WAYS, str(PROGRAMS / "test_arrays.py")]
    finished = start(fake_cuda, ranks, command, 200, **settings)
    assert finished.returncode == 0, finished.output
    assert not finished.left


LOST = """
import os, sys, time
import numpy as np
from arrays import Array, Stream, use
import dl_comm

dl_comm.init()
use(dl_comm.local_rank() % int(os.environ.get("FAKE_CUDA_DEVICES", "1")))
array = Array(np.ones(int(sys.argv[1]), "f4"), Stream())
dl_comm.gradients([array], out=[array])  # selects the path
array.get()
if dl_comm.rank() == 1:
    # Its enqueued work is not complete when it ends.
    array.stream.sleep(1000)
    if sys.argv[2] == "in":
        dl_comm.gradients([array], out=[array])
    os.kill(os.getpid(), 9)
since = time.monotonic()
try:
    dl_comm.gradients([array], out=[array])
    array.get()  # the stream continues
    dl_comm.gradients([array], out=[array])
    print("no error")
except dl_comm.PeerLostError as error:
    print("reported:", error)
array.get()
print("seconds:", int(time.monotonic() - since))
dl_comm.finalize()
print("ended")
"""


@pytest.mark.parametrize(
    ("path", "when", "length"),
    [
        ("ipc", "before", 100),
        pytest.param("ipc", "in", 100, marks=pytest.mark.heavy),
        ("ipc", "in", 600000),
        ("staged", "in", 600000),
        pytest.param("nccl", "before", 600000, marks=pytest.mark.heavy),
        ("nccl", "in", 100),
    ],
)
def test_a_lost_rank_is_reported_and_the_stream_continues(
    fake_cuda: Path, tmp_path: Path, path: str, when: str, length: int
) -> None:
    script = tmp_path / "lost.py"
    script.write_text(LOST)
    command = ending_together([sys.executable, str(script), str(length), when], tmp_path, 2)
    env = {**environment(fake_cuda), **PATHS[path]}
    finished = launch(2, command, 100, env)
    assert not finished.timed_out, finished.output
    assert "reported:" in finished.output, finished.output
    assert "rank 1" in finished.output
    assert "ended" in finished.output, finished.output


LOST_IN_COLLECTIVE = """
import os, sys, time
import numpy as np
from arrays import Array, Stream, use
from device_calls import DeviceWork
import dl_comm

dl_comm.init()
gpu = dl_comm.local_rank() % int(os.environ.get("FAKE_CUDA_DEVICES", "1"))
use(gpu)
collective, length, when = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
given, got = Array(np.ones(2 * length, "f4"), Stream()), Array(np.ones(2 * length, "f4"))
def call():
    stream = given.stream.handle.value
    return DeviceWork(collective, [(given.address.value, got.address.value, length, 2)], (gpu, stream)).wait()
print(f"code: {call()}\\n", end="")  # selects the path
given.get()
if dl_comm.rank() == 1:
    given.stream.sleep(1000)
    if when == "in":
        call()
    os.kill(os.getpid(), 9)
since = time.monotonic()
# The call may be enqueued before the rank is lost.
codes = [call()]
given.get()
codes.append(call())
print(f"code: {codes[-1]}\\n", end="")
assert codes[0] in (0, codes[1])
assert time.monotonic() - since < 20
dl_comm.finalize()
print("ended")
"""


@pytest.mark.parametrize(
    ("path", "when", "collective", "length"),
    [("nccl", "in", 9, 100_000), ("nccl", "before", 5, 10), ("ipc", "in", 8, 1000), ("ipc", "in", 9, 3_000_000)]
    + [
        pytest.param("nccl", when, collective, 100_000, marks=pytest.mark.heavy)
        for when in ("in", "before")
        for collective in (4, 6, 7, 8)
    ],
)
def test_a_rank_lost_in_another_collective_is_reported(
    fake_cuda: Path, tmp_path: Path, path: str, when: str, collective: int, length: int
) -> None:
    script = tmp_path / "lost.py"
    script.write_text(LOST_IN_COLLECTIVE)
    command = ending_together([sys.executable, str(script), str(collective), str(length), when], tmp_path, 2)
    env = {**environment(fake_cuda), **PATHS[path]}
    finished = launch(2, command, 100, env)
    assert not finished.timed_out, finished.output
    assert sorted(re.findall(r"code: (\S+)", finished.output)) == [str(PEER_LOST), "0", "0"], finished.output
    assert "ended" in finished.output, finished.output


WAITING = """
import os, threading, time
import numpy as np
from arrays import Array, Stream, use
from device_calls import blocking_device_call
import dl_comm

dl_comm.init()
GPUS = int(os.environ.get("FAKE_CUDA_DEVICES", "1"))
use(dl_comm.local_rank() % GPUS)
array = Array(np.ones(600000, "f4"), Stream())
call = (array.address.value, 600000, dl_comm.local_rank() % GPUS, array.stream.handle.value)
print(f"code: {blocking_device_call(*call, 'first')}\\n", end="")
if dl_comm.rank() == 1:
    array.stream.sleep(5000)
    threading.Thread(target=blocking_device_call, args=(*call, "second"), daemon=True).start()
    time.sleep(0.5)
    os.kill(os.getpid(), 9)
print(f"code: {blocking_device_call(*call, 'second')}\\n", end="")
dl_comm.finalize()
print("ended")
"""


@pytest.mark.parametrize("path", ["ipc", "staged", "nccl"])
def test_a_call_that_waits_ends_when_a_rank_is_lost(fake_cuda: Path, tmp_path: Path, path: str) -> None:
    script = tmp_path / "waiting.py"
    script.write_text(WAITING)
    command = ending_together([sys.executable, str(script)], tmp_path, 2)
    env = {**environment(fake_cuda), **PATHS[path]}
    finished = launch(2, command, 100, env)
    assert not finished.timed_out, finished.output
    assert sorted(re.findall(r"code: (\S+)", finished.output)) == [str(PEER_LOST), "0", "0"], finished.output
    assert "ended" in finished.output, finished.output


LATE = """
import numpy as np, os, time
from arrays import Array, Stream, use
import dl_comm

dl_comm.init()
use(0)
array = Array(np.ones(100, "f4"), Stream())
dl_comm.gradients([array], out=[array])  # may compile the kernels
dl_comm.set_timeout(2)
if dl_comm.rank() == 1:
    array.stream.sleep(8000)  # the GPU is late, not the rank
try:
    dl_comm.gradients([array], out=[array])
    array.get()
    time.sleep(0.2)
    dl_comm.gradients([array], out=[array])
    print("no error")
except dl_comm.TimeoutError as error:
    print("reported:", error)
"""


def test_a_late_gpu_is_reported_at_the_deadline(fake_cuda: Path, tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(LATE)
    finished = start(fake_cuda, 2, [str(script)], 60)
    assert not finished.timed_out, finished.output
    assert "reported:" in finished.output, finished.output
    assert "on the GPU after" in finished.output, finished.output


KEPT = """
import numpy as np
from arrays import Array, use
import dl_comm

dl_comm.init()
use(0)
array = Array(np.full(100, 2.0 * dl_comm.rank(), "f4"))
dl_comm.gradients([array], out=[array])
print(f"mean: {array.get()[0]}\\n", end="")
dl_comm.finalize()
"""


@pytest.mark.heavy  # compiles all kernels
def test_kernels_of_the_package_need_no_compiler(fake_cuda: Path, tmp_path: Path) -> None:
    import dl_comm

    (tmp_path / "kept.py").write_text(KEPT)
    shutil.copytree(Path(dl_comm.__file__).parent, tmp_path / "package" / "dl_comm")
    kernels, cache = tmp_path / "package" / "dl_comm" / "kernels", tmp_path / "cache"
    program = (
        "import sys\nfrom dl_comm._libraries import build as b\n"
        "b.CAPABILITIES = (90,)\nprint(b.compile_kernels(sys.argv[1]))"
    )
    compiled = run([sys.executable, "-c", program, str(kernels)], 300)
    assert compiled.output.strip() == str(len(list(kernels.iterdir()))), compiled.output
    # A GPU of 9.1 runs the machine code of 9.0.
    given = environment(fake_cuda)
    paths = os.pathsep.join([str(tmp_path / "package"), given["PYTHONPATH"]])
    # The copy does not lie where the package finds MPI.
    libraries = os.pathsep.join([given["LD_LIBRARY_PATH"], str(Path(sys.prefix) / "lib")])
    variables = {"DL_COMM_CACHE": str(cache), "PYTHONPATH": paths, "LD_LIBRARY_PATH": libraries}
    finished = start(fake_cuda, 2, [str(tmp_path / "kept.py")], 100, **variables)
    assert finished.output.count("mean: 1.0") == 2, finished.output
    assert not (cache / "kernels").exists() or not list((cache / "kernels").iterdir())


def test_compiled_kernels_are_cached_for_the_next_process(fake_cuda: Path, tmp_path: Path) -> None:
    script, folder = tmp_path / "kept.py", tmp_path / "cache" / "kernels"
    script.write_text(KEPT)

    def run() -> Path:
        finished = start(fake_cuda, 2, [str(script)], 100, DL_COMM_CACHE=str(folder.parent))
        assert finished.returncode == 0, finished.output
        assert finished.output.count("mean: 1.0") == 2, finished.output
        (kept,) = folder.iterdir()
        return kept

    kept = run()
    whole = kept.read_bytes()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert b".entry average_f32" in whole
    written = kept.stat()
    assert (run().stat().st_ino, kept.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)  # not written again
    # A damaged file is compiled again.
    kept.write_bytes(whole[: len(whole) // 2])
    assert run().read_bytes() == whole
    # A file that others could have written is ignored.
    kept.write_bytes(b"not a kernel")
    folder.chmod(0o777)
    assert run().read_bytes() == b"not a kernel"


LACKING = """
import os
import numpy as np
from arrays import Array, use
import dl_comm

rank = dl_comm.rank()
os.environ["DL_COMM_CACHE"] += f"/{rank}"  # with one cache, one rank finds what the other has compiled
dl_comm.init()
use(0)
if rank == 1:
    os.environ["FAKE_CUDA_NVRTC_FAILS"] = "product_"

def call(operator, expected):
    # Longer than what goes through bounce buffers.
    for length in (100, 300_000):
        array = Array(np.full(length, 2.0 + rank, "f4"))
        dl_comm.allreduce(array, operator, out=array)
        assert (array.get() == expected).all(), (operator, length)

call("product", 6)
call("max", 3)
call("product", 6)
call("sum", 5)
print("all right\\n", end="")
dl_comm.finalize()
"""


def test_calls_go_through_the_host_if_a_rank_lacks_their_kernels(fake_cuda: Path, tmp_path: Path) -> None:
    (tmp_path / "lacking.py").write_text(LACKING)
    finished = start(fake_cuda, 2, [str(tmp_path / "lacking.py")], 100, DL_COMM_CACHE=str(tmp_path))
    assert finished.returncode == 0, finished.output
    assert finished.output.count("all right") == 2, finished.output
    # Once, on the rank that lacks them.
    assert finished.output.count("such calls go through host memory") == 1, finished.output


@pytest.mark.parametrize("name", ["DL_COMM_GPU_PATH", "DL_COMM_PIPELINE_CHUNK_KB"])
def test_settings_that_differ_between_ranks_are_reported(tmp_path: Path, name: str) -> None:
    script = tmp_path / "differs.py"
    script.write_text(
        "import os\n"
        f"value = {{'DL_COMM_GPU_PATH': 'staged', 'DL_COMM_PIPELINE_CHUNK_KB': '64'}}['{name}']\n"
        f"if os.environ.get('PMI_RANK', os.environ.get('OMPI_COMM_WORLD_RANK')) == '1': os.environ['{name}'] = value\n"
        "import dl_comm\n"
        "try:\n"
        "    dl_comm.init()\n"
        "except dl_comm.MismatchError as error:\n"
        "    print(f'reported: {error}\\n', end='')\n"
    )
    finished = launch(2, [sys.executable, str(script)], 60)
    assert finished.output.count("reported:") == 2, finished.output
    assert "for GPUs" in finished.output, finished.output


def test_the_doctor_reports_gpus_and_unusable_drivers(fake_cuda: Path, tmp_path: Path) -> None:
    def lines(folder: Path, **settings: str) -> str:
        command = ["-m", "dl_comm.doctor", "--quick"]
        return start(folder, 1, command, 100, **settings).output

    output = lines(fake_cuda, FAKE_CUDA_DEVICES="2")
    assert "driver for CUDA 13.0, 2 GPUs" in output, output
    assert "used if each rank has its own GPU" in output, output
    old = tmp_path / "old"
    old.mkdir()
    source = tmp_path / "old.c"
    source.write_text(
        "int cuInit(unsigned f) { return (int)f; } int cuDriverGetVersion(int* v) { *v = 9000; return 0; }"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(old / "libcuda.so.1"), str(source)], check=True)
    output = lines(old)
    assert "too old" in output, output
    assert "panic" not in output
