"""Arbitrary arguments to every function of the package give a result or a documented exception.

The calls run in a program of one rank. A panic, an abort, a hang, or a wrong average afterwards fails the test.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from launch import run

FUZZ = Path(__file__).parent / "fuzz_bindings.py"


@pytest.mark.parametrize("examples", [20, pytest.param(100, marks=pytest.mark.heavy)])
@pytest.mark.parametrize("binding", ["numpy", "torch", "tensorflow"])
def test_any_arguments_give_a_result_or_a_documented_error(binding: str, examples: int) -> None:
    finished = run([sys.executable, str(FUZZ), binding, str(examples)], 120)
    assert finished.returncode == 0, finished.output[-8000:]
    assert "every call came back" in finished.output
