"""Builds of op libraries: once for concurrent ranks, by command, and with clear errors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dl_comm._libraries import build
from installed import needs
from launch import launch, run

needs("torch")


@pytest.mark.heavy
def test_concurrent_ranks_build_once(tmp_path: Path) -> None:
    program = tmp_path / "first_use.py"
    program.write_text(
        "import torch, dl_comm as mc, dl_comm.torch as dt\nmc.init()\n"
        "(mean,) = mc.gradients([torch.full((3,), float(mc.get_rank()))], 0)\nassert mean[0] == 1, mean\n"
        "import os; os.write(1, b'fine\\n')"
    )
    cache = tmp_path / "cache"
    finished = launch(3, [sys.executable, str(program)], 200, {"DL_COMM_CACHE": str(cache), "OMP_NUM_THREADS": "1"})
    assert finished.output.count("fine") == 3, finished.output
    assert finished.output.count("building libdl_comm_torch.so for torch-") == 1, finished.output
    (folder,) = cache.iterdir()
    assert folder.name.startswith("torch-")
    # torch with CUDA also gets the CUDA library.
    names = {path.name for path in folder.iterdir()}
    assert names - {"libdl_comm_torch_cuda.so"} == {"libdl_comm_torch.so", "built.json", "lock"}

    again = subprocess.run(
        [sys.executable, "-m", "dl_comm.build", "torch"],
        env={**os.environ, "DL_COMM_CACHE": str(cache)},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    first, second = again.stdout.splitlines()
    assert first == f"torch: {folder}/libdl_comm_torch.so"
    # Its library for torch.distributed is another one, with a folder of its own.
    name, _, path = second.partition(": ")
    assert name == "torch.distributed"
    assert Path(path).name == "libdl_comm_c10d.so"
    assert Path(path).exists()
    assert again.stderr.count("(once") == 1
    assert "building libdl_comm_c10d.so" in again.stderr

    use = [sys.executable, "-c", "import dl_comm.torch as dt; print('rank', dt.rank())"]
    library = folder / "libdl_comm_torch.so"
    os.truncate(library, library.stat().st_size // 2)
    mended = run(use, 200, {"DL_COMM_CACHE": str(cache)})
    assert re.search("is damaged(.*\n)*rank 0", mended.output), mended.output

    for place in (folder, cache):
        place.chmod(0o777)
        refused = run(use, 100, {"DL_COMM_CACHE": str(cache)})
        place.chmod(0o700)
        assert f"does not load op libraries from {place}: another user can write there" in refused.output
        assert refused.returncode == 1, refused.output


def test_a_missing_compiler_is_reported(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "CXX"}
    done = subprocess.run(
        [sys.executable, "-c", "import dl_comm.torch"],
        env={**env, "DL_COMM_CACHE": str(tmp_path), "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    assert "no C++ compiler found" in done.stderr
    assert "python -m dl_comm.build" in done.stderr


def test_a_failed_build_shows_the_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dl_comm.build", "torch"],
        env={**os.environ, "DL_COMM_CACHE": str(tmp_path), "CXX": "false"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    assert "building dl_comm's op library for torch failed" in done.stderr
    assert "compiler" in done.stderr
    assert not list(tmp_path.rglob("*.so"))


def test_a_build_says_what_the_package_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before it compiles: a package with libraries for other versions."""
    monkeypatch.setattr(build, "prebuilt_abis", lambda name: ["torch-2.8", "torch-2.9"])
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(ImportError, match="op library for torch.distributed failed"):
        build._build("torch.distributed", tmp_path)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dl_comm: building libdl_comm_c10d.so for torch-")
    assert line.endswith("(once, about a minute): this package has it for torch-2.8, torch-2.9")


def test_an_unknown_framework_is_refused() -> None:
    command = [sys.executable, "-m", "dl_comm.build", "caffe"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "caffe" in done.stderr


def test_a_long_build_says_that_it_goes_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(build, "_PROGRESS_S", 0.1)
    text = "import time; print('much' * 100_000); time.sleep(0.5); raise SystemExit('the end')"
    command = [sys.executable, "-c", text]
    with pytest.raises(ImportError, match="op library for torch failed") as caught:
        build._run(command, "torch")
    assert str(caught.value).endswith("the end")
    assert capsys.readouterr().err.count("dl_comm: building libdl_comm_torch.so: ") >= 2
