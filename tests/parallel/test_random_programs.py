"""Random programs against a model (``random_programs.py``): seconds in the gate, minutes in ``tests/heavy.sh``."""

from __future__ import annotations

import pytest

from frameworks import Framework
from random_programs import Program

SHORT, LONG = 6_000, 200_000


def run(framework: Framework, seed: int, length: int, steps: int) -> None:
    """Runs a program; the seed repeats it."""
    program = Program(framework, seed, length)
    try:
        program.run(steps)
    except Exception as error:
        error.add_note(f"seed {seed}, length {length}, after {program.steps} of {steps} steps")
        raise
    program.free()


@pytest.mark.parametrize("seed", range(3))
def test_a_program_of_the_gate(framework: Framework, seed: int) -> None:
    run(framework, seed, SHORT, 60)


def test_a_program_with_long_calls(framework: Framework) -> None:
    run(framework, 1000, LONG, 30)


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(10, 60))
def test_many_programs(framework: Framework, seed: int) -> None:
    run(framework, seed, SHORT if seed % 5 else LONG, 300)
