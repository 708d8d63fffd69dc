"""Programs on the stand-in for the CUDA driver."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent
PROGRAMS = TESTS / "fake_gpu"


def environment(libraries: Path) -> dict[str, str]:
    """That of a program which takes the CUDA driver of the folder ``libraries``, and imports fake_gpu/arrays.py.

    fake_cuda/fake.py can be imported too: it has memory of other kinds.
    """
    return {"LD_LIBRARY_PATH": str(libraries), "PYTHONPATH": f"{PROGRAMS}:{TESTS}:{TESTS / 'fake_cuda'}"}
