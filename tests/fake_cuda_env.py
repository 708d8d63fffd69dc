"""Builds the fake CUDA driver, and has the environment of programs with it.

``python tests/fake_cuda_env.py`` builds it, and prints the folder of its libraries.
"""

from __future__ import annotations

import fcntl
import subprocess
from pathlib import Path

TESTS = Path(__file__).parent
PROGRAMS = TESTS / "fake_gpu"


def build() -> Path:
    """Builds the driver, once for all processes that ask; returns the folder for ``LD_LIBRARY_PATH``."""
    folder = TESTS.parent / "build/fake_cuda"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (["-S", str(TESTS / "fake_cuda"), "-B", str(folder)], ["--build", str(folder), "-j2"]):
            done = subprocess.run(
                ["cmake", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
            )
            if done.returncode != 0:
                raise SystemExit(f"the fake CUDA driver does not build:\n{done.stdout}")
    return folder / "lib"


def environment(libraries: Path) -> dict[str, str]:
    """Selects the CUDA driver in the folder ``libraries``, and makes fake_gpu/arrays.py importable.

    fake_cuda/fake.py is importable too; it has other kinds of memory. MPS seems to run.
    """
    return {
        "LD_LIBRARY_PATH": str(libraries),
        "PYTHONPATH": f"{PROGRAMS}:{TESTS}:{TESTS / 'fake_cuda'}",
        "CUDA_MPS_PIPE_DIRECTORY": str(TESTS / "fake_cuda" / "mps"),
    }


if __name__ == "__main__":
    print(build())
