"""The torch example on GPUs: two ranks train on scikit-learn's digits, with the accuracy of CPU training."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from job import KIND
from launch import launch

pytest.importorskip("sklearn")

TRAIN = Path(__file__).resolve().parents[2] / "examples/torch_mnist/train.py"


def test_the_example_learns(tmp_path: Path) -> None:
    checkpoint = tmp_path / "model"
    options = ["--epochs", "6", "--device", KIND, "--checkpoint", str(checkpoint)]
    # An empty folder without cached MNIST.
    cache = os.environ.get("DL_COMM_CACHE", str(Path("~/.cache/dl_comm").expanduser()))
    env = {"HOME": str(tmp_path), "DL_COMM_CACHE": cache}
    finished = launch(2, [sys.executable, str(TRAIN), *options], 200, env)
    assert finished.returncode == 0, finished.output
    assert f"training on {KIND}" in finished.output
    found = re.findall(r"^test accuracy: (\d\.\d{4})$", finished.output, re.MULTILINE)
    assert len(found) == 1, finished.output
    assert float(found[0]) >= 0.85, finished.output
    assert checkpoint.exists()
