"""Keras in processes of their own: a backend that dl_comm does not take, a first call in training."""

from __future__ import annotations

import sys

import pytest

from imported import python
from installed import needs
from launch import launch

needs("tensorflow", "keras>=3.0")
pytestmark = pytest.mark.xdist_group("tensorflow")


def test_another_backend_is_refused(tmp_path):
    path = tmp_path / "script.py"
    # The backends numpy and openvino need packages of their own.
    path.write_text("import keras\nkeras.backend.backend = lambda: 'numpy'\nimport dl_comm.keras\n")
    environment = {"KERAS_BACKEND": "torch", "TF_CPP_MIN_LOG_LEVEL": "3"}
    result = launch(1, [sys.executable, str(path)], timeout=120, env=environment)
    assert result.returncode != 0
    assert "on numpy: set KERAS_BACKEND=" in result.output


def test_batch_normalization_starts_dl_comm_when_it_trains(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        "import numpy as np\nimport dl_comm\nimport dl_comm.keras\n"
        "layer = dl_comm.keras.SyncBatchNormalization()\nx = np.ones((2, 3), np.float32)\n"
        "layer(x)\nprint('before:', dl_comm.is_initialized())\n"
        "layer(x, training=True)\nprint('after:', dl_comm.is_initialized())\n"
    )
    command = [*python("tensorflow"), str(path)]
    result = launch(1, command, timeout=120, env={"TF_CPP_MIN_LOG_LEVEL": "3"})
    assert "before: False\nafter: True" in result.output, result.output
