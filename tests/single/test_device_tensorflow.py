"""TensorFlow's GPU kernels on a fake GPU: every collective and element type, by each path, on 1 to 3 ranks."""

from __future__ import annotations

import fcntl
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from fake_cuda_env import PROGRAMS, TESTS, environment
from launch import launch


@pytest.fixture(scope="session")
def device_library(fake_cuda: Path) -> Path:
    """The pluggable device of fake_cuda/tensorflow_device.cc; built once for all processes."""
    found = importlib.util.find_spec("tensorflow")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs TensorFlow")
    headers = Path(found.submodule_search_locations[0]) / "include"
    source = TESTS / "fake_cuda" / "tensorflow_device.cc"
    library = fake_cuda / "libtensorflow_device.so"
    with (fake_cuda / "tensorflow_device.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
            flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-fPIC", "-shared", f"-I{headers}"]
            command = ["c++", *flags, "-o", str(library), str(source), f"-L{fake_cuda}", "-l:libcuda.so.1"]
            subprocess.run(command, check=True, timeout=200)
    return library


# One launch for all paths: each rank has a GPU, and there is a group for each path.
@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.heavy), 2, pytest.param(3, marks=pytest.mark.heavy)]
)
def test_every_collective_and_type_by_each_path(fake_cuda: Path, device_library: Path, ranks: int) -> None:
    settings = {
        **environment(fake_cuda),
        "TENSORFLOW_DEVICE": str(device_library),
        "FAKE_CUDA_DEVICES": str(ranks),
        "FAKE_CUDA_DELAY_US": "20",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    # Only for the ranks: the launcher has no GPU.
    preload = ["env", f"LD_PRELOAD={device_library}"]
    command = [*preload, sys.executable, "-m", "pytest", "-x", "-q", str(PROGRAMS / "test_tensorflow.py")]
    finished = launch(ranks, command, 300, settings)
    assert finished.returncode == 0, finished.output
    assert not finished.left
