"""Which framework versions the packaged op libraries support."""

from __future__ import annotations

from pathlib import Path

import pytest

from dl_comm import _build


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that replaces the package's, with both libraries, built for torch 2.11 (CUDA) and TensorFlow 2.20."""
    monkeypatch.setattr(_build, "PACKAGE", tmp_path)
    monkeypatch.setattr(_build, "_torch_has_cuda", lambda: True)
    for name, version in (("torch", "torch-2.11.0"), ("tf", "tensorflow-2.20.0")):
        (tmp_path / f"libdl_comm_{name}.so").touch()
        (tmp_path / f"libdl_comm_{name}.so.built-for").write_text(f"{version}\n")
    (tmp_path / "libdl_comm_torch_cuda.so").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("version", "serves"),
    [
        ("torch-2.11.0", True),
        ("torch-2.11.0+cu130", True),
        ("torch-2.10.0+cpu", True),
        ("torch-2.15.0a0+git1234", True),
        ("torch-3.0.0", True),
        ("torch-2.9.1", False),
        ("torch-1.13.1", False),
        ("torch-main", False),
    ],
)
def test_torch_by_its_stable_abi(package: Path, monkeypatch: pytest.MonkeyPatch, version: str, serves: bool) -> None:
    monkeypatch.setattr(_build, "framework_version", lambda framework: version)
    assert _build.packaged_library("torch") == (package / "libdl_comm_torch.so" if serves else None)


def test_torch_with_cuda_needs_the_library_for_cuda(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_build, "framework_version", lambda framework: "torch-2.11.0")
    (package / "libdl_comm_torch_cuda.so").unlink()
    assert _build.packaged_library("torch") is None
    monkeypatch.setattr(_build, "_torch_has_cuda", lambda: False)
    assert _build.packaged_library("torch") == package / "libdl_comm_torch.so"


@pytest.mark.parametrize(("version", "serves"), [("tensorflow-2.20.0", True), ("tensorflow-2.21.0", False)])
def test_tensorflow_by_its_version(package: Path, monkeypatch: pytest.MonkeyPatch, version: str, serves: bool) -> None:
    monkeypatch.setattr(_build, "framework_version", lambda framework: version)
    assert _build.packaged_library("tensorflow") == (package / "libdl_comm_tf.so" if serves else None)
