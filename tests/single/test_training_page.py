"""Runs the scripts of docs/training.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from imported import TORCH, python
from launch import launch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "training.md"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}


@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.heavy), 2, pytest.param(3, marks=pytest.mark.heavy)]
)
@pytest.mark.parametrize(
    ("framework", "part", "files", "pattern"),
    [
        ("torch", "scaled_lr", ["model.pt"], r"error 0\.0\d\d\d, good"),
        pytest.param("keras", "scaled_lr", ["model.keras"], r"loss [01]\.\d+", marks=pytest.mark.heavy),
        ("torch", "seed_rank", ["model.pt"], r"the end: \d+ steps, in epoch 4\n"),
        pytest.param(
            "torch", "DistributedSampler", [], r"evaluation: error 0\.00\d+ of 101\n", marks=pytest.mark.heavy
        ),
    ],
)
def test_the_scripts(
    framework: str,
    part: str,
    files: list[str],
    pattern: str,
    ranks: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip(framework)
    scripts = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    found = re.compile(rf"^import {framework}\b.*training\.{part}\(", re.DOTALL | re.MULTILINE)
    (script,) = [script for script in scripts if found.search(script)]
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(script)
    result = launch(
        ranks,
        [*python(*(TORCH if framework == "torch" else ("tensorflow",))), "script.py"],
        timeout=120,
        env=ENVIRONMENT,
    )
    assert result.returncode == 0, result.output
    assert len(re.findall(pattern, result.output)) == 1, result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["script.py", *files])
