"""Which CUDA libraries the core loads from Python's packages."""

from __future__ import annotations

import ctypes
import sysconfig
from pathlib import Path

import pytest

from dl_comm._base import cuda


def test_nvrtc_must_not_be_newer_than_the_driver() -> None:
    assert cuda.fits("libnvrtc.so.13", 13)
    assert cuda.fits("libnvrtc.so.12", 13)
    assert not cuda.fits("libnvrtc.so.13", 12)
    assert not cuda.fits("libnvrtc-builtins.so.13.0", 12)
    assert cuda.fits("libnvrtc.so.13", None)
    assert cuda.fits("libnccl.so.2", 1)


def test_the_newest_compatible_version_is_loaded_unless_the_user_selects_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = (
        "cu13/lib/libnvrtc.so.13",
        "cuda_nvrtc/lib/libnvrtc.so.12",
        "cu13/lib/libnvrtc.alt.so.13",
        "nccl/lib/libnccl.so.2",
    )
    for name in names:
        file = tmp_path / "nvidia" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: None)

    def loaded(driver: int | None) -> list[str]:
        monkeypatch.setattr(cuda, "_driver", lambda: driver)
        return [str(Path(file).relative_to(tmp_path / "nvidia")) for file in cuda.preload.__wrapped__()]

    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    assert loaded(13) == ["cu13/lib/libnvrtc.so.13", "nccl/lib/libnccl.so.2"]
    assert loaded(12) == ["cuda_nvrtc/lib/libnvrtc.so.12", "nccl/lib/libnccl.so.2"]
    assert loaded(11) == ["nccl/lib/libnccl.so.2"]
    chosen = tmp_path / "chosen"
    chosen.mkdir()
    (chosen / "libnccl.so.2").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(chosen))
    assert loaded(None) == ["cu13/lib/libnvrtc.so.13"]
