"""Keras in processes of their own: the page of the documentation, and a backend that is not TensorFlow."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from launch import launch

pytest.importorskip("tensorflow")
pytest.importorskip("keras", minversion="3.0")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "keras.md"


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.heavy), 2])
def test_the_script_of_the_documentation(tmp_path, ranks):
    script = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    path = tmp_path / "script.py"
    path.write_text(script)
    result = launch(ranks, [sys.executable, str(path)], timeout=120, env={"TF_CPP_MIN_LOG_LEVEL": "3"})
    assert result.returncode == 0, result.output
    losses = re.findall(rf"rank \d of {ranks}: loss ([0-9.]+)", result.output)
    assert len(losses) == ranks
    assert len(set(losses)) == 1


def test_another_backend_is_refused(tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "script.py"
    path.write_text("import dl_comm\nimport dl_comm.keras\n")
    environment = {"KERAS_BACKEND": "torch", "TF_CPP_MIN_LOG_LEVEL": "3"}
    result = launch(1, [sys.executable, str(path)], timeout=120, env=environment)
    assert result.returncode != 0
    assert "KERAS_BACKEND=tensorflow" in result.output


def test_batch_normalization_starts_dl_comm_when_it_trains(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        "import numpy as np\nimport dl_comm\nimport dl_comm.keras\n"
        "layer = dl_comm.keras.SyncBatchNormalization()\nx = np.ones((2, 3), np.float32)\n"
        "layer(x)\nprint('before:', dl_comm.is_initialized())\n"
        "layer(x, training=True)\nprint('after:', dl_comm.is_initialized())\n"
    )
    result = launch(1, [sys.executable, str(path)], timeout=120, env={"TF_CPP_MIN_LOG_LEVEL": "3"})
    assert "before: False\nafter: True" in result.output, result.output
