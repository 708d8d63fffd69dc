"""The environment of programs with the fake CUDA driver."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent
PROGRAMS = TESTS / "fake_gpu"


def environment(libraries: Path) -> dict[str, str]:
    """Selects the CUDA driver in the folder ``libraries``, and makes fake_gpu/arrays.py importable.

    fake_cuda/fake.py is importable too; it has other kinds of memory. MPS seems to run.
    """
    return {
        "LD_LIBRARY_PATH": str(libraries),
        "PYTHONPATH": f"{PROGRAMS}:{TESTS}:{TESTS / 'fake_cuda'}",
        "CUDA_MPS_PIPE_DIRECTORY": str(TESTS / "fake_cuda" / "mps"),
    }
