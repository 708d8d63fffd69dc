"""Which path calls on device memory take, with a fake CUDA driver and NCCL: drivers, GPUs and demands that differ."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fake_cuda_env import environment
from launch import Finished, launch


def start(fake_cuda: Path, ranks: int, command: list[str], timeout: float, **settings: str) -> Finished:
    env = {**environment(fake_cuda), **settings}
    return launch(ranks, [sys.executable, *command], timeout, env)


def test_a_requested_path_that_nccl_refuses(fake_cuda: Path, tmp_path: Path) -> None:
    script = tmp_path / "refused.py"
    script.write_text("""
import numpy as np
from arrays import Array, Stream, use
import dl_comm

dl_comm.init()
use(dl_comm.local_rank())
array = Array(np.ones(10, "f4"), Stream())
try:
    dl_comm.gradients([array], out=[array])
except dl_comm.CommError as error:
    print(f"refused: {error}", flush=True)
dl_comm.finalize()
""")
    settings = {"FAKE_CUDA_DEVICES": "2", "FAKE_CUDA_NCCL_FAILS": "1", "DL_COMM_GPU_PATH": "nccl"}
    finished = start(fake_cuda, 2, [str(script)], 100, **settings)
    assert finished.returncode == 0, finished.output
    assert finished.output.count("refused: ") == 2, finished.output
    assert finished.output.count("DL_COMM_GPU_PATH is nccl, but rank 1: ") == 2, finished.output


BY_LENGTH = """
import numpy as np
from arrays import Array, Stream, counters, use
import dl_comm

dl_comm.init()
use(0)
KERNELS = 2
def launches(length):
    array = Array(np.full(length, 1.0 + dl_comm.rank(), "f4"), Stream())
    before = counters()[KERNELS]
    dl_comm.gradients([array], out=[array])
    assert (array.get() == 1.5).all()
    return counters()[KERNELS] - before
counts = [launches(length) > 0 for length in (1000, 500_000, 600_000, 1000)]
gpu = dl_comm.topology()["teams"][0]["gpu"]
advice = "start MPS" in str(gpu["advice"])
print(f"kernels: {counts} {gpu['path']} {gpu['mps']} {gpu['staged_below']} {advice}\\n", end="")
dl_comm.finalize()
"""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"CUDA_MPS_PIPE_DIRECTORY": "none"}, "[False, False, True, False] ipc False 2097152 True"),
        ({"CUDA_MPS_PIPE_DIRECTORY": "none", "DL_COMM_GPU_PATH": "ipc"}, "[True, True, True, True] ipc False 0 True"),
        ({}, "[True, True, True, True] ipc True 0 False"),
    ],
)
def test_short_calls_go_through_the_host_where_kernels_take_turns(
    fake_cuda: Path, tmp_path: Path, settings: dict[str, str], expected: str
) -> None:
    script = tmp_path / "by_length.py"
    script.write_text(BY_LENGTH)
    finished = start(fake_cuda, 2, [str(script)], 60, **settings)
    assert finished.returncode == 0, finished.output
    assert finished.output.count(f"kernels: {expected}\n") == 2, finished.output
    lines = len(re.findall(r"^dl_comm: ranks share a GPU.*start MPS", finished.output, re.M))
    assert lines == int("CUDA_MPS_PIPE_DIRECTORY" in settings), finished.output


REFUSED = """
import ctypes, sys
import dl_comm
from dl_comm._dl_comm import average_on

array = (4096, 2, [4], (0, 0, False), None)  # an address and no more

dl_comm.init()
try:
    average_on([array], [array], 0)
    print("no error")
except dl_comm.CommError as error:
    print("reported:", error)
print(dl_comm.gradients([__import__("numpy").ones(2)]))
"""


def test_without_a_driver_the_error_says_so_and_the_rest_works(tmp_path: Path) -> None:
    script = tmp_path / "refused.py"
    script.write_text(REFUSED)
    finished = launch(1, [sys.executable, str(script)], 60)
    assert "reported:" in finished.output, finished.output
    assert "libcuda.so.1" in finished.output
    assert "1., 1." in finished.output
    assert "panic" not in finished.output


def test_a_driver_without_gpus_or_functions_is_reported(fake_cuda: Path, tmp_path: Path) -> None:
    script = tmp_path / "refused.py"
    script.write_text(REFUSED)
    finished = start(fake_cuda, 1, [str(script)], 60, FAKE_CUDA_DEVICES="0")
    assert "reported:" in finished.output, finished.output
    assert "1., 1." in finished.output
    # An invalid library of that name.
    empty = tmp_path / "empty"
    empty.mkdir()
    source = tmp_path / "none.c"
    source.write_text("int cuInit(unsigned flags) { return (int)flags; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(empty / "libcuda.so.1"), str(source)], check=True)
    finished = start(empty, 1, [str(script)], 60)
    assert "too old" in finished.output, finished.output
    assert "1., 1." in finished.output
    assert "panic" not in finished.output


def test_another_library_of_the_drivers_other_name_is_refused(fake_cuda: Path, tmp_path: Path) -> None:
    script = tmp_path / "refused.py"
    script.write_text(REFUSED)
    (tmp_path / "libcuda.so").write_bytes((fake_cuda / "libcuda.so.1").read_bytes())
    finished = start(fake_cuda, 1, [str(script)], 60, LD_LIBRARY_PATH=f"{tmp_path}:{fake_cuda}")
    assert f"{tmp_path}/libcuda.so is another library" in finished.output, finished.output
    assert "LD_LIBRARY_PATH" in finished.output, finished.output
    assert "1., 1." in finished.output


def test_a_gpu_for_one_process_is_reported_with_what_to_do(fake_cuda: Path, tmp_path: Path) -> None:
    script = tmp_path / "refused.py"
    script.write_text(REFUSED)
    finished = start(fake_cuda, 1, [str(script)], 60, FAKE_CUDA_EXCLUSIVE="1")
    assert "EXCLUSIVE_PROCESS" in finished.output, finished.output
    assert "start MPS" in finished.output, finished.output
    assert "1., 1." in finished.output


@pytest.mark.parametrize(("wanted", "why"), [("nccl", "share a GPU"), ("ipc", "cannot export memory")])
def test_an_unavailable_path_is_refused_with_the_reason(fake_cuda: Path, tmp_path: Path, wanted: str, why: str) -> None:
    script = tmp_path / "wanted.py"
    script.write_text(
        "import numpy as np, dl_comm\n"
        "from arrays import Array, use\n"
        "dl_comm.init(); use(0)\n"
        "array = Array(np.ones(4, 'f4'))\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        dl_comm.gradients([array], out=[array])\n"
        "    except dl_comm.ArgumentError as error:\n"
        "        print('reported:', error)\n"
        "print(dl_comm.gradients([np.ones(2)]))\n"
    )
    finished = start(fake_cuda, 2, [str(script)], 60, DL_COMM_GPU_PATH=wanted, FAKE_CUDA_NO_IPC="1")
    assert finished.returncode == 0, finished.output
    assert finished.output.count("reported:") == 4, finished.output
    assert why in finished.output, finished.output
