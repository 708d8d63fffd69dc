"""Tests of the fake CUDA driver and NCCL (tests/fake_cuda), which the GPU tests of the core use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hosts

FOLDER = Path(__file__).parent.parent / "fake_cuda"
PATIENCE = 60


# A program gets a /dev/shm of its own, and what it leaves there is printed: concurrent tests leave files, too.
_ALONE = [
    "unshare",
    "--mount",
    "sh",
    "-c",
    'mount -t tmpfs tmpfs /dev/shm && "$@"; code=$?; ls -A /dev/shm; exit $code',
    "-",
]


def _run(
    fake_cuda: Path, program: str, settings: dict[str, str], before: list[str]
) -> subprocess.CompletedProcess[str]:
    """Runs a program, with ``before`` at the beginning of its command line."""
    file, name = program.split("/")
    env = {key: value for key, value in os.environ.items() if not key.startswith("FAKE_CUDA_")}
    return subprocess.run(
        [*before, sys.executable, str(FOLDER / file), name],
        env={**env, "LD_LIBRARY_PATH": str(fake_cuda), **settings},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


TWO = {"FAKE_CUDA_DEVICES": "2"}
SLOW = {"FAKE_CUDA_DELAY_US": "2000"}


@pytest.mark.parametrize(
    ("program", "settings"),
    [
        ("programs.py/errors", {}),
        (
            "programs.py/settings",
            {**TWO, "FAKE_CUDA_NO_IPC": "1", "FAKE_CUDA_NO_MEMOPS": "1", "FAKE_CUDA_DRIVER": "12020"},
        ),
        ("programs.py/no_device", {"FAKE_CUDA_DEVICES": "0"}),
        ("programs.py/pointers", {}),
        ("programs.py/registering", {}),
        ("programs.py/kernels", {}),
        ("programs.py/stop", {}),
        ("programs.py/count", {}),
        ("programs.py/events", {}),
        ("programs.py/events", SLOW),
        ("programs.py/asynchronous", {}),
        ("ipc_programs.py/ipc", TWO),
        ("ipc_programs.py/ipc", {**TWO, **SLOW}),
        ("ipc_programs.py/overlap", {}),
        ("ipc_programs.py/freed", {}),
        ("ipc_programs.py/handles", {}),
        ("programs.py/one_queue", {"FAKE_CUDA_ONE_QUEUE": "1"}),
        ("programs.py/slices", {"FAKE_CUDA_TIME_SLICES": "1"}),
        ("programs.py/waiting_calls", {"FAKE_CUDA_WAITING_CALLS": "1"}),
        ("ipc_programs.py/no_peers", {**TWO, "FAKE_CUDA_NO_PEERS": "1"}),
        ("ipc_programs.py/no_peers", {**TWO, "FAKE_CUDA_MIG": "2"}),
        ("programs.py/faults", {"FAKE_CUDA_FAULTS": "1"}),
        ("programs.py/shutdown", {}),
        ("programs.py/stale", {}),
        ("nccl_programs.py/sums", {"FAKE_CUDA_DEVICES": "3"}),
        ("nccl_programs.py/sums", {"FAKE_CUDA_DEVICES": "3", **SLOW}),
        ("nccl_programs.py/blocks", {"FAKE_CUDA_DEVICES": "3"}),
        ("nccl_programs.py/blocks", {"FAKE_CUDA_DEVICES": "3", **SLOW}),
        ("nccl_programs.py/messages", {"FAKE_CUDA_DEVICES": "3"}),
        ("nccl_programs.py/messages", {"FAKE_CUDA_DEVICES": "3", **SLOW}),
        ("nccl_programs.py/patient", TWO),
        ("nccl_programs.py/patient", {**TWO, "FAKE_CUDA_DELAY_US": "50000"}),
        ("nccl_programs.py/same_device", TWO),
        ("nccl_programs.py/slices", {"FAKE_CUDA_DEVICES": "3", "FAKE_CUDA_MIG": "2"}),
        ("nccl_programs.py/one_fails", {**TWO, "FAKE_CUDA_NCCL_FAILS": "1"}),
        ("nccl_programs.py/threads", TWO),
    ],
)
def test_the_fake_driver(fake_cuda: Path, program: str, settings: dict[str, str]) -> None:
    done = _run(fake_cuda, program, settings, _ALONE if hosts.possible() else [])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("program", "settings", "words"),
    [
        ("programs.py/aborts_host_access", {}, None),
        ("programs.py/aborts_unpinned", {}, "cuMemcpyHtoDAsync, source: 10 bytes at 0x"),
        ("programs.py/aborts_beyond_memory", {}, "cuMemsetD8Async: 11 bytes at 0x"),
        ("programs.py/aborts_freed_in_use", {}, "cuMemsetD8Async: 10 bytes at 0x"),
        ("programs.py/aborts_kernel_beyond_memory", {}, "average_f32, a source: 400 bytes at 0x"),
        ("programs.py/aborts_synchronize", {}, "cuCtxSynchronize was called"),
        ("ipc_programs.py/aborts_peer", TWO, "to which device 1 has no access"),
        ("nccl_programs.py/aborts_differ", TWO, "count 2, dtype 7"),
        ("nccl_programs.py/aborts_messages", TWO, "8 bytes of dtype 7 are sent, 16 of dtype 7 expected"),
    ],
)
def test_invalid_use_aborts(fake_cuda: Path, program: str, settings: dict[str, str], words: str | None) -> None:
    done = _run(fake_cuda, program, settings, [])
    assert done.returncode != 0
    if words is None:
        assert done.returncode == -11, "memory of a device is no memory of the host"
    else:
        lines = [line for line in done.stderr.splitlines() if line.startswith("fake_cuda: ")]
        assert lines, done.stderr
        assert all(words in line for line in lines)
