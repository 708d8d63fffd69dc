"""Plain processes as ranks: no launcher starts them, variables give them their numbers."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launch import QUIET
from ranks import free_port

MEET = """
import os, time
def mark(name):
    open(os.path.join(os.path.dirname(os.path.abspath(__file__)), name), "w").close()
def wait_for(*names):
    until, here = time.monotonic() + 90, os.path.dirname(os.path.abspath(__file__))
    while not all(os.path.exists(os.path.join(here, name)) for name in names):
        assert time.monotonic() < until, names
        time.sleep(0.01)
def meet(rank, *ranks):
    mark(f"up.{rank}")
    wait_for(*(f"up.{each}" for each in ranks))
"""
"""Programs of one folder wait for each other, so that a deadline does not include the starts of their interpreters."""
HEAD = (
    MEET
    + """
import json, os, signal, subprocess, sys, threading, time
import numpy as np
import dl_comm
from dl_comm import _dl_comm
rank, size = int(os.environ["DL_COMM_RANK"]), int(os.environ["DL_COMM_SIZE"])
def check_mean():
    (mean,) = dl_comm.gradients([np.full(5000, rank, np.float32)])
    assert (mean == (size - 1) / 2).all(), mean
def start_fails(*names):
    try: dl_comm.init()
    except (dl_comm.CommError, ValueError) as error: caught = str(error)
    else: raise SystemExit("no error")
    print(caught, flush=True)
    assert all(name in caught for name in names)
"""
)


@contextmanager
def shared_memory() -> Iterator[Path]:
    """A folder for the shared memory of a job, which must leave nothing there. Concurrent tests have others."""
    with tempfile.TemporaryDirectory(prefix="test_of_dl_comm.", dir="/dev/shm") as folder:
        yield Path(folder)
        until = time.monotonic() + 10
        # A killed process ends a moment later than its launcher.
        while (left := os.listdir(folder)) and time.monotonic() < until:
            time.sleep(0.1)
        assert not left, left


class Ranks:
    """Plain processes that run one script."""

    def __init__(self, folder: Path, shared: Path) -> None:
        """Scripts are written to ``folder``; ``shared`` is for the ranks' shared memory."""
        self._folder, self._shared = folder, shared
        self._processes: list[subprocess.Popen[str]] = []
        self.address = f"127.0.0.1:{free_port()}"
        self.python = [sys.executable]

    def start(self, rank: int, size: int, text: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        script = self._folder / f"script{len(self._processes)}.py"
        script.write_text(HEAD + text)
        variables = {"DL_COMM_RANK": str(rank), "DL_COMM_SIZE": str(size), "DL_COMM_ADDR": self.address}
        variables["DL_COMM_SHM_DIR"] = str(self._shared)
        process = subprocess.Popen(
            [*self.python, str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **QUIET, "DL_COMM_TIMEOUT_S": "60", **variables, **(env or {})},
        )
        self._processes.append(process)
        return process

    def run(self, size: int, text: str, env: dict[str, str] | None = None) -> None:
        """All ranks run ``text`` and succeed."""
        processes = [self.start(rank, size, text, env) for rank in range(size)]
        outputs = [process.communicate(timeout=100)[0] for process in processes]
        # A rank may fail because another one has.
        assert not any(process.returncode for process in processes), "\n".join(outputs)

    def wait_for(self, *marks: str) -> None:
        """Waits until the programs have called ``mark`` with these names."""
        until = time.monotonic() + 90
        while not all((self._folder / name).exists() for name in marks):
            assert time.monotonic() < until, marks
            time.sleep(0.01)

    def wait_for_connections(self, count: int) -> None:
        """Waits until so many connections to the address of rank 0 stand."""
        port, until = int(self.address.rpartition(":")[2]), time.monotonic() + 90
        while True:
            lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
            # Local address, remote address, state (1: established).
            if (
                sum(int(remote.rpartition(":")[2], 16) == port and state == "01" for _, _, remote, state, *_ in lines)
                >= count
            ):
                return
            assert time.monotonic() < until, lines
            time.sleep(0.01)

    def forget(self, *marks: str) -> None:
        """Removes marks of earlier programs."""
        for name in marks:
            (self._folder / name).unlink(missing_ok=True)

    @staticmethod
    def succeeds(process: subprocess.Popen[str]) -> str:
        output, _ = process.communicate(timeout=100)
        assert process.returncode == 0, output
        return output

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
