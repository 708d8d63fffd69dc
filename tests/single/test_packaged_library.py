"""Which framework versions the packaged op libraries support."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dl_comm._libraries import build


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that replaces the package's, with both libraries, built for torch 2.11 (CUDA) and TensorFlow 2.20."""
    monkeypatch.setattr(build, "PACKAGE", tmp_path)
    monkeypatch.setattr(build, "_torch_has_cuda", lambda: True)
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
    monkeypatch.setattr(build, "framework_version", lambda framework: version)
    assert build.packaged_library("torch") == (package / "libdl_comm_torch.so" if serves else None)


def test_torch_with_cuda_needs_the_library_for_cuda(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "framework_version", lambda framework: "torch-2.11.0")
    (package / "libdl_comm_torch_cuda.so").unlink()
    assert build.packaged_library("torch") is None
    monkeypatch.setattr(build, "_torch_has_cuda", lambda: False)
    assert build.packaged_library("torch") == package / "libdl_comm_torch.so"


@pytest.mark.parametrize(("version", "serves"), [("tensorflow-2.20.0", True), ("tensorflow-2.21.0", False)])
def test_tensorflow_by_its_version(package: Path, monkeypatch: pytest.MonkeyPatch, version: str, serves: bool) -> None:
    monkeypatch.setattr(build, "framework_version", lambda framework: version)
    assert build.packaged_library("tensorflow") == (package / "libdl_comm_tf.so" if serves else None)


@pytest.mark.parametrize(
    ("name", "version", "abi"),
    [
        ("torch.distributed", "torch-2.11.0", "torch-2.11"),
        ("torch.distributed", "torch-2.11.3+cu130", "torch-2.11"),
        ("torch.distributed", "torch-2.11.0+cpu", "torch-2.11"),
        ("torch.distributed", "torch-2.12.0a0+git1234", None),
        ("torch.distributed", "torch-2.11.0+local", None),
        ("torch", "torch-2.16.0a0+git1234", "torch"),
        ("torch", "torch-2.9.1", None),
        ("tensorflow", "tensorflow-cpu-2.20.0", "tensorflow-2.20.0"),
        ("tensorflow", "tensorflow-2.20.0", "tensorflow-2.20.0"),
        ("tensorflow", "tensorflow-rocm-2.20.0", None),
        ("tensorflow", "tf-nightly-2.20.0", None),
        ("tensorflow", "tensorflow-2.20.0rc1", None),
    ],
)
def test_prebuilt_libraries_by_abi(
    package: Path, monkeypatch: pytest.MonkeyPatch, name: str, version: str, abi: str | None
) -> None:
    monkeypatch.setattr(build, "framework_version", lambda framework: version)
    assert build.abi_of(name, version) == abi
    for library in package.glob("libdl_comm_*"):
        library.unlink()
    assert build.packaged_library(name) is None
    file = package / "prebuilt" / (abi or version) / build._LIBRARIES[name].file
    file.parent.mkdir(parents=True)
    file.touch()
    (file.parent / "libdl_comm_torch_cuda.so").touch()
    assert build.packaged_library(name) == (file if abi else None)


def test_the_library_that_was_built_at_install_comes_first(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "framework_version", lambda framework: "tensorflow-2.20.0")
    file = package / "prebuilt" / "tensorflow-2.20.0" / "libdl_comm_tf.so"
    file.parent.mkdir(parents=True)
    file.touch()
    assert build.packaged_library("tensorflow") == package / "libdl_comm_tf.so"


def test_a_library_that_was_built_by_command_replaces_that_of_the_package(
    package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "framework_version", lambda framework: "torch-2.11.0")
    monkeypatch.setattr(build, "_build", fake_build)
    monkeypatch.setenv("DL_COMM_CACHE", str(tmp_path / "cache"))
    assert build.existing_library("torch") == package / "libdl_comm_torch.so"
    built = build.cached_library("torch", force=True)
    assert build.existing_library("torch") == built
    built.write_text("damaged")
    assert build.existing_library("torch") == package / "libdl_comm_torch.so"
    build.cached_library("torch", force=True)
    built.parent.chmod(0o777)  # others could have changed it
    assert build.existing_library("torch") == package / "libdl_comm_torch.so"


def fake_build(name: str, folder: Path) -> None:
    library = folder / build._LIBRARIES[name].file
    library.write_text("built")
    (folder / build._MANIFEST).write_text(json.dumps({library.name: build._size_and_hash(library)}))


def test_what_is_missing_is_named(package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a compiler."""
    monkeypatch.setattr(build, "framework_version", lambda framework: "tensorflow-2.99.0")
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    (package / "prebuilt" / "tensorflow-2.20.0").mkdir(parents=True)
    (package / "prebuilt" / "tensorflow-2.20.0" / "libdl_comm_tf.so").touch()
    named = r"^no C\+\+.*tensorflow-2.99.0 \(this package has it for tensorflow-2.20.0\)"
    with pytest.raises(ImportError, match=named):
        build._build("tensorflow", tmp_path)
