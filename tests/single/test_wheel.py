"""The contents of the CUDA op library, and of a wheel for another machine (``DL_COMM_TEST_WHEEL``).

No wheel is built here, which takes minutes: tests/gpu/wheel.sh runs this file on the one that it has built. That needs
no installed dl_comm.
"""

from __future__ import annotations

import os
import subprocess
import zipfile
from pathlib import Path

import pytest

WHEEL = os.environ.get("DL_COMM_TEST_WHEEL")


def read(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def assert_tells_of_streams(library: Path) -> None:
    """Fails unless the library has its function, and uses the loaded libtorch_cuda.so."""
    exported = [line.split()[-1] for line in read("nm", "-D", "--defined-only", str(library)).splitlines()]
    assert "dl_comm_current_stream" in exported
    assert "[libtorch_cuda.so]" in read("readelf", "-dW", str(library))


def test_the_cuda_library_is_built_if_torch_has_cuda() -> None:
    pytest.importorskip("torch")
    from dl_comm._libraries import build

    if not build._torch_has_cuda():
        pytest.skip("torch was built without CUDA")
    library = build.packaged_library("torch") or build.cached_library("torch")
    assert_tells_of_streams(library.with_name("libdl_comm_torch_cuda.so"))


@pytest.mark.skipif(WHEEL is None, reason="DL_COMM_TEST_WHEEL names no wheel")
def test_a_wheel_for_other_machines(tmp_path: Path) -> None:
    wheel = Path(str(WHEEL))
    assert wheel.name.split("-")[2:4] == ["py3", "none"]
    assert wheel.name.split("-")[4].startswith("linux_")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    package = tmp_path / "dl_comm"
    for name in ("_dl_comm.abi3.so", "libdl_comm.so.0", "libdl_comm_torch.so", "libdl_comm_torch.so.built-for"):
        assert (package / name).exists(), name
    assert not (package / "libdl_comm_tf.so").exists()
    assert_tells_of_streams(package / "libdl_comm_torch_cuda.so")
    # No paths of the build machine.
    for library in package.glob("*.so*"):
        if library.suffix != ".built-for":
            found = [line for line in read("readelf", "-dW", str(library)).splitlines() if "RUNPATH" in line]
            assert all("[$ORIGIN" in line and ":" not in line.split("[")[1] for line in found), found
