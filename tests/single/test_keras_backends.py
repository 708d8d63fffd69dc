"""Keras 3 on torch and on jax, on 1, 2 and 3 ranks: what `keras_backend.py` checks, and a rank that is lost."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from launch import QUIET, Finished, run

PROGRAM = Path(__file__).with_name("keras_backend.py")
pytestmark = pytest.mark.costly
backends = pytest.mark.parametrize(
    "backend",
    [
        pytest.param(name, marks=pytest.mark.skipif(not (find_spec(name) and find_spec("keras")), reason=f"no {name}"))
        for name in ("torch", "jax")
    ],
)


def start(backend: str, ranks: int, *command: str) -> Finished:
    """Runs a Python program on ranks, by the project's launcher."""
    settings = {
        "KERAS_BACKEND": backend,
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "DL_COMM_TIMEOUT_S": "60",
    }
    own = [sys.executable, "-m", "dl_comm.run", "-n", str(ranks), sys.executable, *command]
    return run(own, 300, {**QUIET, **settings})


@backends
@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.heavy), 2, pytest.param(3, marks=pytest.mark.heavy)]
)
def test_fit_equals_one_process_with_the_whole_batch(backend: str, ranks: int, tmp_path: Path) -> None:
    found = start(backend, ranks, str(PROGRAM), str(tmp_path))
    assert found.returncode == 0, found.output
    assert "all equal" in found.output, found.output


LOST = """
import os
import keras
import numpy as np
import dl_comm
import dl_comm.keras as dk

dl_comm.init()
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile(dk.DistributedOptimizer("sgd"), loss="mse")
end = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: dl_comm.rank() == 1 and os._exit(3))
try:
    model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=4, verbose=0, callbacks=[dk.BroadcastCallback(), end])
except Exception as error:
    print("found", type(dl_comm.error_of(error)).__name__, flush=True)
"""


@backends
def test_a_lost_rank_ends_fit_on_the_others(backend: str) -> None:
    found = start(backend, 2, "-c", LOST)
    assert "found PeerLostError" in found.output, found.output
