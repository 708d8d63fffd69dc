"""Runs scripts with ``python -m dl_comm.tf1`` in separate processes, which begin with TensorFlow imported."""

from __future__ import annotations

from pathlib import Path

from imported import python
from launch import Finished, launch, run

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}


def start(folder: Path, script: str, *arguments: str, ranks: int = 0) -> Finished:
    """Runs `script` on `ranks` ranks, or with 0 without a launcher."""
    path = folder / "script.py"
    path.write_text(script)
    command = [*python("tensorflow", run_module="dl_comm.tf1"), str(path), *arguments]
    return launch(ranks, command, 120, QUIET) if ranks else run(command, 60, QUIET)


def passes(folder: Path, script: str, *arguments: str, ranks: int = 0) -> str:
    finished = start(folder, script, *arguments, ranks=ranks)
    assert finished.returncode == 0, finished.output
    assert finished.output.count("fine") == max(ranks, 1), finished.output
    return finished.output
