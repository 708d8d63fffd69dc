"""What the tests rely on of their own launcher."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from imported import python
from launch import launch


@pytest.mark.parametrize("imported", [False, True])
def test_the_lines_of_ranks_do_not_mix(imported: bool, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("for number in range(1000):\n    print('number', number, 2.0, flush=True)\n")
    finished = launch(3, [*(python("numpy") if imported else [sys.executable]), str(script)], 60)
    lines = finished.output.splitlines()
    assert finished.returncode == 0, finished.output[-1000:]
    assert len(lines) == 3000, len(lines)
    assert all(re.fullmatch(r"number \d+ 2\.0", line) for line in lines)
