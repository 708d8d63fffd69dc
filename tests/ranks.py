"""Starts a program on several ranks as torchrun does: plain processes with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.

As a script: ``python tests/ranks.py RANKS SECONDS COMMAND...``. No launcher of MPI is involved. Every line of output
starts with its rank in brackets.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from launch import QUIET, Finished, run

_GRACE = "DL_COMM_TEST_GRACE_S"
_GRACE_S = 15.0


def start(
    ranks: int,
    command: Sequence[str],
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
    *,
    grace: float = _GRACE_S,
    echo: bool = False,
) -> Finished:
    """Runs ``command`` on ``ranks`` ranks; its exit status is that of the first rank that failed, or 0.

    After the first failure, the other ranks have ``grace`` seconds to end. At the timeout, all processes are killed, as
    ``launch.run`` does it. The last lines of the output are ``rank N ended: STATUS``.
    """
    own = [sys.executable, os.path.abspath(__file__), "--here", str(ranks), *command]
    return run(own, timeout, {**QUIET, **(env or {}), _GRACE: str(grace)}, echo)


def free_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets for a rank of a single host."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _print(rank: int, process: subprocess.Popen[str]) -> None:
    """Prints the output of a rank; each line is one write, so that lines of ranks do not mix."""
    assert process.stdout is not None
    for line in process.stdout:
        sys.stdout.write(f"[{rank}] {line.rstrip()}\n")
        sys.stdout.flush()


def _here(ranks: int, command: Sequence[str]) -> int:
    """Runs the ranks as children of this process."""
    port, grace = free_port(), float(os.environ.get(_GRACE, _GRACE_S))
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, **environment(rank, ranks, port)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        for rank in range(ranks)
    ]
    readers = [threading.Thread(target=_print, args=pair, daemon=True) for pair in enumerate(processes)]
    for reader in readers:
        reader.start()
    failed: int | None = None
    until = float("inf")
    while any(process.poll() is None for process in processes):
        if failed is None and (codes := [code for process in processes if (code := process.poll())]):
            failed, until = codes[0], time.monotonic() + grace
        if time.monotonic() > until:
            for rank, process in enumerate(processes):
                if process.poll() is None:
                    print(f"killed rank {rank}, {grace:g} s after another rank failed", flush=True)
                    process.kill()
        time.sleep(0.02)
    for reader in readers:
        # A child of a rank may hold the pipe.
        reader.join(5)
    codes = [process.wait() for process in processes]
    for rank, code in enumerate(codes):
        print(f"rank {rank} ended: {code}", flush=True)
    return failed if failed is not None else next((code for code in codes if code), 0)


def main() -> int:
    """The command line."""
    if sys.argv[1] == "--here":
        code = _here(int(sys.argv[2]), sys.argv[3:])
        return code if code >= 0 else 128 - code
    ranks, timeout, *command = sys.argv[1:]
    finished = start(int(ranks), command, float(timeout), echo=True)
    if finished.timed_out:
        print(f"killed after {timeout} s: {shlex.join(command)} on {ranks} ranks", file=sys.stderr)
        return 1
    return finished.returncode


if __name__ == "__main__":
    sys.exit(main())
