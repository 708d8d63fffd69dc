"""Fixtures of the tests that run once and start their own programs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import hosts
from fake_cuda_env import build
from launch import Finished, launch
from plain_ranks import Ranks, shared_memory

# What tests/run.sh hides from programs; tests draw.
_HIDDEN = str(Path(__file__).parents[1] / "absent")
sys.path[:] = [folder for folder in sys.path if folder != _HIDDEN]


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Finished]:
    """Runs Python text on several ranks: ``script(ranks, text, timeout=..., env=...)``."""

    def start(ranks: int, text: str, timeout: float = 60, env: dict[str, str] | None = None) -> Finished:
        path = tmp_path / "script.py"
        path.write_text(text)
        return launch(ranks, [sys.executable, str(path)], timeout, env)

    return start


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    """Plain processes; they leave no shared memory."""
    with shared_memory() as folder:
        made = Ranks(tmp_path, folder)
        try:
            yield made
        finally:
            made.end()


@pytest.fixture(scope="module")
def two() -> Iterator[hosts.Hosts]:
    """Two hosts of network namespaces."""
    if not hosts.possible():
        pytest.skip("needs root and iproute2 to make network namespaces")
    with hosts.Hosts(2) as made:
        yield made


@pytest.fixture(scope="session")
def fake_cuda() -> Iterator[Path]:
    """The folder of the fake libcuda.so.1, libnccl.so.2 and libnvrtc.so.12, for LD_LIBRARY_PATH."""
    yield build()
    # Remove files of killed or aborted processes.
    for file in Path("/dev/shm").glob("fake_*.*.*"):
        if not Path("/proc", file.name.split(".")[1]).exists():
            file.unlink(missing_ok=True)
