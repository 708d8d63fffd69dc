"""The benchmarks run; what they measure is for the one who runs them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from launch import launch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_overlap() -> None:
    options = ["--face", "numpy", "--compute-ms", "1", "--average-ms", "0.3", "--steps", "5"]
    finished = launch(2, [sys.executable, str(BENCHMARKS / "overlap.py"), *options], 100)
    assert finished.returncode == 0, finished.output
    row = r"\| numpy \| \d+\.\d MiB \|( \d+\.\d\d ms \| \d+\.\d\d ms \| \d+\.\d{3} \|){2}"
    assert len(re.findall(rf"^{row}$", finished.output, re.MULTILINE)) == 1, finished.output
