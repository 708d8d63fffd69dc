"""Plain processes as ranks of Horovod: its variables give them their numbers, as a launcher without MPI does."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ranks import free_port

PACKAGE = Path(__file__).parents[3] / "python" / "horovod"


def environment(**more: str) -> dict[str, str]:
    """The environment of a program that finds the package."""
    path = os.pathsep.join([str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])])
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", "DL_COMM_TIMEOUT"))}
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "DL_COMM_DUMP_DIR": "none", **more}


def run_ranks(
    script: str,
    size: int,
    env: Mapping[str, str] | None = None,
    timeout: float = 90,
    expect: int | None = 0,
    python: Sequence[str] = (sys.executable,),
) -> list[str]:
    """Runs a script on ranks; returns their outputs. ``expect``: the exit status of each; None: any."""
    job = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": str(free_port())}
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(script)
        file.flush()
        processes = [
            subprocess.Popen(
                [*python, file.name],
                env=environment(HOROVOD_RANK=str(rank), HOROVOD_SIZE=str(size), **job, **(env or {})),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(size)
        ]
        outputs = _outputs(processes, timeout)
    for process, output in zip(processes, outputs, strict=True):
        assert expect is None or process.returncode == expect, output
    return outputs


def _outputs(processes: Sequence[subprocess.Popen[str]], timeout: float) -> list[str]:
    """Those of processes that end within ``timeout``; kills the others."""
    try:
        return [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
